"""What a user can get wrong: one line that names the thing and the cure, code 2, nothing lost."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.tiers.contracts import Signal
from kvtier.tiers.nvme import catalogue
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.tier import NvmeTier
from tests.tiny_model import make_tiny_model
from tests.tools.conftest import SMALL, Run, command


@pytest.fixture
def store(run: Run, documents: Path, tiny: Path, tmp_path: Path) -> Path:
    """A store that holds the five documents."""
    path = tmp_path / "store"
    said = run("prewarm", documents, "--model", tiny, "--store", path, *SMALL)
    assert said.code == 0, said.err
    return path


def copy_model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_directory_that_lacks_a_file_is_told_which(
    run: Run, tiny: Path, tmp_path: Path, name: str
) -> None:
    model = copy_model(tiny, tmp_path)
    (model / name).unlink()
    complaint = run("generate", "--model", model, "--prompt", "Hi", *SMALL).complaint
    assert str(model) in complaint and name in complaint


def test_a_model_directory_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    complaint = run("generate", "--model", tmp_path / "no", "--prompt", "Hi").complaint
    assert f"{tmp_path / 'no'}: no such model directory" in complaint


def test_an_unsupported_architecture_is_named_beside_those_that_are(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny, tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    complaint = run("generate", "--model", model, "--prompt", "Hi").complaint
    assert "MambaForCausalLM" in complaint and "LlamaForCausalLM" in complaint


def test_a_store_of_another_format_is_left_alone(
    run: Run, documents: Path, tiny: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(catalogue, "FORMAT_VERSION", 99)
        said = run("prewarm", documents, "--model", tiny, "--store", store, *SMALL)
        assert "format" in said.complaint and "new directory" in said.complaint
        assert "format" in run("check", store).complaint
        assert "format" in run("stats", store).complaint
    assert run("check", store).code == 0


def test_a_store_in_use_names_its_owner_and_the_sidecar(
    run: Run, documents: Path, tiny: Path, store: Path
) -> None:
    owner = NvmeTier.open(store, capacity_bytes=1 << 26, signal=Signal())
    try:
        said = run("prewarm", documents, "--model", tiny, "--store", store, *SMALL)
        assert f"PID {os.getpid()}" in said.complaint and "kvtier serve" in said.complaint
        assert "in use" in run("check", store).complaint
    finally:
        owner.close()
    assert run("check", store).code == 0


def test_a_disk_that_is_full_at_opening_is_said_so(
    run: Run, documents: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Files, path: Path, *, create: bool = False, read_only: bool = False) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Files, "open", full)
    said = run("prewarm", documents, "--model", tiny, "--store", tmp_path / "store", *SMALL)
    assert "disk is full" in said.complaint and "free some space" in said.complaint


def test_a_disk_that_fills_up_ends_the_run_and_loses_nothing(
    run: Run, documents: Path, tiny: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (documents / "foxtrot.txt").write_text("foxtrot is new here. " * 20)
    held = run("stats", store, "--json").summary["numbers"]["blocks"]

    def full(self: Files, fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = ["prewarm", documents, "--model", tiny, "--store", store, *SMALL, "--json"]
    with monkeypatch.context() as later:
        later.setattr(Files, "allocate", full)
        said = run(*arguments)
    assert "foxtrot.txt" in said.complaint and "free disk space" in said.complaint
    assert (said.summary["already_there"], said.summary["failed"]) == (5, 1)
    assert run("stats", store, "--json").summary["numbers"]["blocks"] == held
    assert run("check", store).code == 0
    assert run(*arguments).summary["computed"] == 1


@pytest.mark.parametrize("nvme", ["100", "20KiB", "1MiB"])
def test_a_capacity_that_cannot_do_is_refused_before_any_work(
    run: Run, tmp_path: Path, nvme: str
) -> None:
    document = tmp_path / "long.txt"
    document.write_text("the long story goes on, and on, " * 20)
    model = model_with_large_blocks(tmp_path)
    arguments = ["prewarm", document, "--model", model, "--store", tmp_path / "store"]
    said = run(*arguments, "--hbm", "64MiB", "--dram", "64MiB", "--nvme", nvme)
    assert "is less than" in said.complaint and "--nvme" in said.complaint
    assert "tokens computed" not in said.out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("nvme", ["100", "20KiB"])
def test_a_capacity_below_one_block_is_refused(run: Run, tmp_path: Path, nvme: str) -> None:
    model = model_with_large_blocks(tmp_path)
    arguments = ["generate", "--prompt", "hello", "--model", model, "--store", tmp_path / "store"]
    said = run(*arguments, "--hbm", "64MiB", "--dram", "64MiB", "--nvme", nvme)
    assert "one block" in said.complaint
    assert not (tmp_path / "store").exists()


def test_a_refused_capacity_costs_the_store_nothing(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    arguments = ["prewarm", documents, "--model", tiny, "--store", store]
    assert run(*arguments, *SMALL).code == 0
    held = run("stats", store, "--json").summary["numbers"]["blocks"]
    small = ["--hbm", "8MiB", "--dram", "16MiB", "--nvme", "64KiB"]
    assert "is less than" in run(*arguments, *small).complaint
    assert run("stats", store, "--json").summary["numbers"]["blocks"] == held > 0


def model_with_large_blocks(tmp_path: Path) -> Path:
    """A block of 128 KiB: 16 layers, 64 numbers wide, 16 tokens, float32, K and V."""
    return make_tiny_model(
        tmp_path / "large", num_hidden_layers=16, num_key_value_heads=1, head_dim=64
    )


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(run: Run, tiny: Path, prompt: str) -> None:
    complaint = run("generate", "--model", tiny, "--prompt", prompt, *SMALL).complaint
    assert "prompt: empty" in complaint


def test_a_prompt_longer_than_the_model_allows_names_both_numbers(run: Run, tiny: Path) -> None:
    complaint = run("generate", "--model", tiny, "--prompt", "x" * 800, *SMALL).complaint
    assert "700" in complaint and "shorten" in complaint


def test_a_document_longer_than_the_model_allows_fails_alone(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    (documents / "long.txt").write_text("y" * 900)
    place = ["--store", tmp_path / "store", *SMALL, "--json"]
    said = run("prewarm", documents, "--model", tiny, *place)
    assert "long.txt" in said.complaint and "700" in said.complaint
    assert (said.summary["computed"], said.summary["failed"]) == (5, 1)


def test_a_document_list_with_a_missing_file_is_refused_before_any_work(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    rows = [{"id": "a", "path": "documents/alpha.txt"}, {"id": "b", "path": "documents/gone.txt"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = tmp_path / "store"
    said = run("prewarm", tmp_path / "list.jsonl", "--model", tiny, "--store", store, *SMALL)
    assert "gone.txt: no such file" in said.complaint
    assert not store.exists()


def test_a_codec_that_there_is_not_is_named_before_anything_is_made(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    store, socket = tmp_path / "store", tmp_path / "socket"
    for arguments in (
        ["prewarm", documents, "--model", tiny, "--store", store],
        ["generate", "--model", tiny, "--prompt", "Hi"],
        ["serve", "--socket", socket, "--store", store],
    ):
        complaint = run(*arguments, "--codec", "lz4").complaint
        assert "'lz4' is unknown; use one of raw, zstd, auto" in complaint
    assert not store.exists() and not socket.exists()


def test_a_codec_for_a_sidecars_store_is_the_sidecars_to_say(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    arguments = ["prewarm", documents, "--model", tiny, "--socket", tmp_path / "socket"]
    assert "give it to kvtier serve" in run(*arguments, "--codec", "zstd").complaint


def test_no_sidecar_at_the_socket_names_the_command_that_starts_one(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    socket = tmp_path / "socket"
    for arguments in (
        ["prewarm", documents, "--model", tiny, "--socket", socket, *SMALL],
        ["generate", "--model", tiny, "--prompt", "Hi", "--socket", socket, *SMALL],
        ["stats", "--socket", socket],
    ):
        complaint = run(*arguments).complaint
        assert f"no sidecar at {socket}" in complaint and "kvtier serve --socket" in complaint


def test_a_store_that_is_not_there_is_not_made_by_looking(run: Run, tmp_path: Path) -> None:
    for arguments in (["check", tmp_path / "no"], ["stats", tmp_path / "no"]):
        assert str(tmp_path / "no") in run(*arguments).complaint
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "thing"),
    [
        (["--store", "a", "--socket", "b"], "give one of the two"),
        ([], "--store DIR"),
        (["--store", "a", "--nvme", "lots"], "--nvme: 'lots' is not a size"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    run: Run, documents: Path, tiny: Path, arguments: list[str], thing: str
) -> None:
    assert thing in run("prewarm", documents, "--model", tiny, *arguments).complaint


@pytest.mark.parametrize("option", [["--max-tokens", "0"], ["--temperature", "-1"]])
def test_sampling_out_of_range_is_refused(run: Run, tiny: Path, option: list[str]) -> None:
    said = run("generate", "--model", tiny, "--prompt", "Hi", *option)
    assert "sampling." in said.complaint


def test_a_real_process_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        command("check", tmp_path / "no"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("kvtier: error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["serve", "--socket", "s"], ["generate", "--model", "m", "--prompt", "Hi"]]
)
def test_a_write_budget_that_is_no_size_is_named(run: Run, words: list[str]) -> None:
    complaint = run(*words, "--write-budget", "lots").complaint
    assert "--write-budget: 'lots' is not a size" in complaint
