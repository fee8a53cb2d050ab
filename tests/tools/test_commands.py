"""The commands on a tiny model: what one run stores, the next one finds."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier.tools
from tests.tools.conftest import SMALL, Run, command


def prewarm(run: Run, documents: Path, tiny: Path, *place: object) -> dict[str, object]:
    said = run("prewarm", documents, "--model", tiny, *place, *SMALL, "--json")
    assert said.code == 0, said.err
    return said.summary


def test_prewarmed_documents_are_hits_on_nvme_and_never_computed_again(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = prewarm(run, documents, tiny, "--store", store)
    assert (first["computed"], first["already_there"], first["failed"]) == (5, 0, 0)
    again = prewarm(run, documents, tiny, "--store", store)
    assert (again["computed"], again["already_there"]) == (0, 5)
    assert again["tokens_computed"] == 0 and again["blocks_written"] == 0

    ask = ["generate", "--model", tiny, "--prompt", "Who is here?", *SMALL, "--json"]
    about = [*ask, "--max-tokens", "7", "--document", documents / "delta.txt"]
    warm = run(*about, "--store", store).summary
    cold = run(*about).summary
    assert warm["hit_tokens"]["nvme"] == warm["cached_tokens"] > warm["prompt_tokens"] - 48
    assert cold["cached_tokens"] == 0
    assert warm["text"] == cold["text"]
    assert run("check", store).code == 0


def test_a_salt_shares_nothing(run: Run, documents: Path, tiny: Path, tmp_path: Path) -> None:
    place = ["--store", tmp_path / "store"]
    prewarm(run, documents, tiny, *place)
    about = ["generate", "--model", tiny, "--prompt", "Who?", "--document", documents / "echo.txt"]
    said = run(*about, *place, *SMALL, "--max-tokens", "1", "--salt", "pepper", "--json")
    assert said.summary["cached_tokens"] == 0


def test_text_goes_to_standard_output_and_the_account_to_standard_error(
    run: Run, tiny: Path
) -> None:
    said = run("generate", "--model", tiny, "--prompt", "Hello", *SMALL, "--max-tokens", "3")
    assert said.code == 0
    assert re.search(r"0 of \d+ prompt tokens cached; first token after \d+\.\d+ s", said.err)
    assert "cached" not in said.out


def test_stats_counts_what_prewarm_wrote(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    written = prewarm(run, documents, tiny, "--store", tmp_path / "store")["blocks_written"]
    seen = run("stats", tmp_path / "store", "--json").summary
    assert seen["numbers"]["blocks"] == written
    assert [each["blocks"] for each in seen["namespaces"]] == [written]


def test_check_reports_a_flipped_byte_and_exits_with_1(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    prewarm(run, documents, tiny, "--store", store)
    segment = next((store / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[8192 + 17] ^= 1  # in the first block of the first record
    segment.write_bytes(content)
    said = run("check", store, "--json")
    assert said.code == 1
    assert said.summary["ok"] is False and len(said.summary["problems"]) == 1


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Path]:
    """A real `kvtier serve` beside the test; the path of its socket."""
    socket = tmp_path / "run" / "s"
    arguments = ["serve", "--socket", socket, "--store", tmp_path / "shared", "--dram", "16MiB"]
    process = subprocess.Popen(
        command(*arguments, "--nvme", "64MiB"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert "ready" in process.stdout.readline()
        yield socket
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_prewarm_and_generate_work_through_a_sidecar(
    run: Run, documents: Path, tiny: Path, sidecar: Path
) -> None:
    first = prewarm(run, documents, tiny, "--socket", sidecar)
    assert (first["computed"], first["failed"]) == (5, 0)
    again = prewarm(run, documents, tiny, "--socket", sidecar)
    assert (again["computed"], again["already_there"]) == (0, 5)
    about = ["generate", "--model", tiny, "--prompt", "Who?", "--document", documents / "echo.txt"]
    warm = run(*about, "--socket", sidecar, *SMALL, "--max-tokens", "5", "--json").summary
    assert warm["hit_tokens"].keys() <= {"dram", "nvme"}
    assert warm["cached_tokens"] > warm["prompt_tokens"] - 48
    assert warm["text"] == run(*about, *SMALL, "--max-tokens", "5", "--json").summary["text"]
    assert run("stats", "--socket", sidecar, "--json").summary["numbers"]["nvme.blocks"] > 0


@pytest.mark.parametrize("way", ["module", "path"])
def test_prewarm_runs_as_a_module_and_by_its_path(way: str) -> None:
    place = Path(kvtier.tools.__file__).parent / "prewarm"
    what = ["-m", "kvtier.tools.prewarm"] if way == "module" else [str(place)]
    done = subprocess.run(
        [sys.executable, *what, "--help"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "Compute the KV of documents" in done.stdout
