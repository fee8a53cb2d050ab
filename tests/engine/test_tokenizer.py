"""Text to ids and back, whole and as it comes."""

from pathlib import Path
from shutil import copytree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.engine.errors import BadModelFile, BadPrompt, ModelFileMissing
from kvtier.engine.tokenizer import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_streamed_pieces_add_up_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(each)) for each in ids] + [stream.end()]
    assert "".join(pieces) == tokenizer.decode(ids) == text


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(each)) for each in tokenizer.encode("a€b")]
    assert pieces == ["a", "", "", "€", "b"]


def test_what_is_held_back_appears_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("x€")[:-1]
    assert "".join(stream.push(int(each)) for each in ids) == "x"
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.end() == ""


def test_a_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(chat)
    assert text.endswith("<|im_start|>assistant\n")
    assert not tokenizer.render_chat(chat, reply=False).endswith("assistant\n")
    ids = tokenizer.encode_chat(chat)
    assert ids[0] == tokenizer.inner.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


def test_a_model_without_a_chat_template_says_so(tiny: Path, tmp_path: Path) -> None:
    plain = copytree(tiny, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(BadPrompt, match="no chat template"):
        Tokenizer(plain).render_chat([{"role": "user", "content": "hi"}])


def test_a_directory_without_a_tokenizer_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_one_line(tiny: Path, tmp_path: Path) -> None:
    broken = copytree(tiny, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(BadModelFile, match="tokenizer") as caught:
        Tokenizer(broken)
    assert "\n" not in str(caught.value)
