"""The namespace of a model directory: what changes it, and what its memory may get wrong."""

import os
from pathlib import Path
from shutil import copytree

import pytest

from kvtier.engine import identity
from kvtier.engine.identity import default_memory, namespace_of, weights_digest
from kvtier.engine.model_config import read_config
from kvtier.engine.weights import weight_files
from kvtier.index.namespace import BlockLayout

LAYOUT = BlockLayout(3, 1, 16, 24, "float32")


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return copytree(tiny, tmp_path / "model")


def digest(directory: Path, memory: Path, salt: str = "") -> bytes:
    config = read_config(directory)
    return namespace_of(directory, config, LAYOUT, salt=salt, memory=memory).digest


def test_a_copy_elsewhere_has_the_same_namespace(tiny: Path, copied: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    assert digest(tiny, memory) == digest(copied, memory)


def test_one_changed_weight_changes_the_namespace(copied: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    before = digest(copied, memory)
    path = copied / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert digest(copied, memory) != before


def test_salt_and_configuration_change_the_namespace(copied: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    plain = digest(copied, memory)
    assert digest(copied, memory, "tenant") != plain
    path = copied / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert digest(copied, memory) != plain


def test_a_remembered_file_is_not_read_again(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, files = tmp_path / "deep" / "memory.json", weight_files(copied)
    first = weights_digest(files, memory)

    def unread(*_: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(identity, "file_digest", unread)
    assert weights_digest(files, memory) == first
    os.utime(files[0])
    with pytest.raises(AssertionError, match="read again"):
        weights_digest(files, memory)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}'])
def test_a_damaged_memory_costs_a_hash_and_is_replaced(
    copied: Path, tmp_path: Path, content: str
) -> None:
    memory, files = tmp_path / "memory.json", weight_files(copied)
    memory.write_text(content)
    assert weights_digest(files, memory) == weights_digest(files, tmp_path / "other.json")
    assert str(files[0].name) in memory.read_text()


def test_a_memory_that_cannot_be_written_is_done_without(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = weight_files(copied)
    assert weights_digest(files, tmp_path / "file" / "memory.json")


def test_the_memory_lies_in_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_memory() == tmp_path / "kvtier" / "weights.json"
