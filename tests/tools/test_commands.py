"""The commands on a tiny model: what one run stores, the next one finds."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtier.tools
from tests.nvme.rig import Rig, branch, flip, segment_files
from tests.tiny_model import make_tiny_model
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


def test_a_prewarmed_document_is_pinned_exported_and_forgotten_by_what_prewarm_prints(
    run: Run, documents: Path, tiny: Path, tmp_path: Path
) -> None:
    store, bundle = tmp_path / "store", tmp_path / "b"
    first = run("prewarm", documents, "--model", tiny, "--store", store, *SMALL, "--json")
    rows = first.summary["stored"]
    assert [Path(row["document"]).stem for row in rows] == [
        "alpha",
        "bravo",
        "charlie",
        "delta",
        "echo",
    ]
    assert prewarm(run, documents, tiny, "--store", store)["stored"] == rows
    row = rows[3]
    assert all(row[name] in first.out for name in ("document", "namespace", "prefix"))
    name = ["--namespace", row["namespace"], "--prefix", row["prefix"]]
    assert run("store", "pin", store, *name, "--label", "d").code == 0
    (pin,) = run("store", "pins", store, "--json").summary["pins"]
    assert (pin["label"], pin["prefix"], pin["expires_at"]) == ("d", row["prefix"], None)
    assert pin["namespace"] == row["namespace"]
    (use,) = run("store", "namespaces", store, "--json").summary["namespaces"]
    assert pin["bytes"] == use["pinned_bytes"]
    assert run("store", "unpin", store, *name, "--label", "d").code == 0
    assert run("store", "pins", store, "--json").summary["pins"] == []
    assert run("export", store, bundle, *name, "--json").summary["blocks"] == row["blocks"]
    assert "1 blocks removed" in run("store", "forget", store, *name).out


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
    with serving(tmp_path) as socket:
        yield socket


@contextmanager
def serving(tmp_path: Path, *options: str) -> Iterator[Path]:
    socket = tmp_path / "run" / "s"
    arguments = ["serve", "--socket", socket, "--store", tmp_path / "shared", "--dram", "16MiB"]
    process = subprocess.Popen(
        command(*arguments, "--nvme", "64MiB", *options), stdout=subprocess.PIPE, text=True
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


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose blocks take eight pages."""
    return make_tiny_model(
        tmp_path_factory.mktemp("deep"),
        num_hidden_layers=8,
        head_dim=32,
        max_position_embeddings=700,
    )


def test_documents_prewarmed_with_zstd_take_less_and_answer_alike(
    run: Run, documents: Path, deep: Path, tmp_path: Path
) -> None:
    plain, small = tmp_path / "plain", tmp_path / "small"
    prewarm(run, documents, deep, "--store", plain)
    prewarm(run, documents, deep, "--store", small, "--codec", "zstd")
    used = [run("stats", each, "--json").summary["numbers"] for each in (plain, small)]
    assert used[0]["blocks"] == used[1]["blocks"]
    assert used[1]["used_bytes"] < 0.95 * used[0]["used_bytes"]
    ask = ["generate", "--model", deep, "--prompt", "Who?", *SMALL, "--json", "--max-tokens", "5"]
    about = [*ask, "--document", documents / "delta.txt"]
    warm, cold = run(*about, "--store", small).summary, run(*about).summary
    assert warm["hit_tokens"]["nvme"] == warm["cached_tokens"] > warm["prompt_tokens"] - 48
    assert warm["text"] == cold["text"]
    assert run("check", small).code == 0


def test_a_sidecar_learns_the_size_of_numbers_from_its_first_client(
    run: Run, documents: Path, deep: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, "--codec", "zstd") as socket:
        prewarm(run, documents, deep, "--socket", socket)
        numbers = run("stats", "--socket", socket, "--json").summary["numbers"]
    assert numbers["nvme.codec.zstd_blocks"] == numbers["nvme.blocks"] > 0
    assert numbers["nvme.codec.stored_bytes"] < 0.9 * numbers["nvme.codec.decoded_bytes"]


@pytest.mark.parametrize("way", ["module", "path"])
def test_prewarm_runs_as_a_module_and_by_its_path(way: str) -> None:
    place = Path(kvtier.tools.__file__).parent / "prewarm"
    what = ["-m", "kvtier.tools.prewarm"] if way == "module" else [str(place)]
    done = subprocess.run(
        [sys.executable, *what, "--help"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "Compute the KV of documents" in done.stdout


def test_check_repairs_on_demand_and_says_by_its_exit_code_what_is_left(
    run: Run, tmp_path: Path
) -> None:
    store, blocks = tmp_path / "store", branch(5)
    with Rig(store) as rig:
        rig.put(blocks)
    flip(segment_files(store)[0], 4096 + 8192 + 7)
    assert run("check", store).code == 1
    mended = run("check", store, "--repair", "--json")
    assert mended.code == 0, mended.err
    assert (mended.summary["blocks"], mended.summary["repair"]["forgotten_blocks"]) == (1, 4)
    (store / "catalog" / "data.mdb").write_bytes(b"nothing" * 4000)
    looked = run("check", store)
    assert looked.code == 2 and "--rebuild-catalogue" in looked.complaint
    anew = run("check", store, "--rebuild-catalogue", "--json")
    assert anew.code == 0, anew.err
    assert anew.summary["repair"]["rebuilt"]["blocks"] == anew.summary["blocks"] == 1
    assert run("check", store).code == 0
