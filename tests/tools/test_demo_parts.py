"""The demo's parts on their own: documents, raw reads, processes, one session on a tiny model."""

import os
from pathlib import Path

import pytest

from kvtier.tools.demo import session as session_module
from kvtier.tools.demo.documents import demo_documents
from kvtier.tools.demo.plan import Plan, Subject
from kvtier.tools.demo.processes import background, run_lines
from kvtier.tools.demo.raw import cached_share, measure_raw
from kvtier.tools.demo.results import Ask, Direct, Mode, Raw, State, from_line
from kvtier.tools.errors import DemoFailed
from tests.tiny_model import make_tiny_tokenizer
from tests.tools.conftest import SMALL, Run


def test_documents_come_close_to_their_targets_and_questions_are_short() -> None:
    tokenizer = make_tiny_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    documents = demo_documents(count)
    assert [document.name for document in documents] == ["1k", "2k", "4k"]
    for document, target in zip(documents, (1024, 2048, 4096), strict=True):
        assert 0.8 * target <= count(document.text) <= target
        assert len(document.question.split()) <= 20
    assert demo_documents(count) == documents


def test_raw_reads_cover_the_bytes_asked_for_and_leave_the_page_cache_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(os.urandom(5 * 4096 + 17))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    speed = measure_raw(paths, 7 * 4096 + 5)
    assert speed.nbytes == 7 * 4096
    assert speed.read_s > 0 and speed.memcpy_s > 0
    if _has_direct_io(paths[0]):
        assert cached_share(paths) == 0.0
    paths[0].read_bytes()
    assert cached_share(paths) > 0.4
    with pytest.raises(DemoFailed, match="prewarm again"):
        measure_raw(paths, 50 * 4096)


def _has_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_process_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"kvtier check: .*there is no store here.*\(see .*log"):
        list(run_lines("kvtier check", "kvtier.tools.cli", ["check", "no"], _logs(tmp_path)))


def test_a_background_process_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoFailed, match="reader: exit code 0"),
        background("reader", "this", [], "never said", _logs(tmp_path)),
    ):
        pytest.fail("the block must not run")


def _logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def test_a_fresh_session_asks_from_every_tier_and_answers_alike(
    run: Run,
    documents: Path,
    tiny: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    assert run("prewarm", documents, "--model", tiny, "--store", store, *SMALL).code == 0
    names = ("bravo", "echo")
    subjects = tuple(Subject(name, f"{documents / name}.txt", "Who?") for name in names)
    plan = Plan(str(tiny), 1, Mode.EMBEDDED, 0, subjects, str(store))
    monkeypatch.setattr("kvtier.tools.demo.plan.HBM_BYTES", 8 << 20)
    monkeypatch.setattr("kvtier.tools.demo.plan.DRAM_BYTES", 16 << 20)
    capfd.readouterr()
    assert session_module.main(plan.to_json()) == 0
    found = [from_line(line) for line in capfd.readouterr().out.splitlines()]
    asks = [each for each in found if isinstance(each, Ask)]
    for name in names:
        states = [each.state for each in asks if each.document == name]
        assert states == [
            State.NVME,
            *[State.HBM] * 3,
            *[State.DRAM] * 4,
            State.HBM,
            State.COLD,
        ]
        compared = [each for each in asks if each.document == name and each.question[0] == "A"]
        assert len({each.answer for each in compared}) == 1 and len(compared) == 4
    assert all(each.nvme_bytes_read > 0 for each in asks if each.state is State.NVME)
    assert [type(each) for each in found if not isinstance(each, Ask)] == [Raw, Direct]


def test_a_session_refuses_to_time_a_hit_that_is_none(
    run: Run,
    documents: Path,
    tiny: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tools.demo.plan.HBM_BYTES", 8 << 20)
    monkeypatch.setattr("kvtier.tools.demo.plan.DRAM_BYTES", 16 << 20)
    subject = Subject("echo", f"{documents / 'echo'}.txt", "Who?")
    plan = Plan(str(tiny), 1, Mode.EMBEDDED, 0, (subject,), str(tmp_path / "store"))
    assert session_module.main(plan.to_json()) == 2
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith("kvtier: error: document echo, embedded: ")
    assert "due for a nvme request, none came" in said and "Traceback" not in said
