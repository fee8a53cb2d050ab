"""The GPU benches' arithmetic and grids; and all their code but CUDA's calls, run on the CPU."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from bench import (
    gpu_attention,
    gpu_bandwidth,
    gpu_copies,
    gpu_exact,
    gpu_layout,
    gpu_lengths,
    gpu_pool,
    gpu_prefill,
    gpu_ttft,
    gpu_tune,
)
from bench.gpu import NoGpu, StandIn, describe, open_gpu, same_rows
from bench.gpu_attention import Point, figures_of, fitting, grid
from bench.gpu_budget import Budget
from bench.gpu_figures import FIGURES
from bench.gpu_lengths import share, spread
from bench.gpu_model import ONE_BILLION, TINY, write_model
from bench.gpu_part import Report, Setting, run_part
from bench.gpu_pool import Pool, Shape, check_decode, decode_bytes, fill, make_step, prefill_flops
from bench.gpu_tests import Clerk
from kvtier.engine.llm import LLM
from kvtier.engine.model_config import read_config
from kvtier.engine.request import Completion
from kvtier.engine.runner import Runner
from kvtier.engine.weights import load_weights
from kvtier.index.words import TierId
from kvtier.kernels.configs import Launch
from kvtier.tiers.contracts import Flight

LLAMA_8B = Shape(32, 8, 128, 16)
GIB = 1 << 30

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here"
)

PARTS: dict[str, Callable[[Setting], Report]] = {
    "exact": gpu_exact.measure,
    "bandwidth": gpu_bandwidth.measure,
    "attention": gpu_attention.measure,
    "lengths": gpu_lengths.measure,
    "layout": gpu_layout.measure,
    "prefill": gpu_prefill.measure,
    "copies": gpu_copies.measure,
    "ttft": gpu_ttft.measure,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are faster on one thread, above all beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@interpreted
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_dry_and_reports_what_it_is_asked_for(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_part(part, "a part", PARTS[part], ["--dry", "--directory", str(tmp_path)])
    told = capsys.readouterr().out.splitlines()[-1]
    report = json.loads(told)
    wanted = {figure.name for figure in FIGURES[part]}
    assert report["status"] == "measured" and not report["dropped"]
    figures, skips = set(report["figures"]), set(report["skips"])
    # At toy sizes no point of the decode grid has a target.
    assert figures | skips == wanted - {"decode_b8_8k", "decode_b1_32k"}
    assert not figures & skips
    assert not [each for each in threading.enumerate() if each.name.startswith("bench-")]


@interpreted
def test_tuning_scores_the_shipped_sizes_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    run_part("tune", "tuning", gpu_tune.measure, ["--dry"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["notes"]["best"]) == {"float16", "float8_e4m3fn"}
    shipped = Launch(64, 4, 3)
    found = gpu_tune.candidates(shipped)
    assert found[0] == shipped and len(found) == len(set(found)) == 36 + 3
    assert all(each.rows == shipped.rows for each in found)


def test_sizes_that_a_card_has_no_room_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> float:
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(gpu_tune, "score", refuse)
    setting = Setting(StandIn(), Budget(60.0), Path())
    shape = Shape(4, 1, 16, 16, torch.float16)
    assert gpu_tune.tune(setting, shape, torch.float16) == []
    assert len(setting.budget.dropped) == 3 and "shared memory" in setting.budget.dropped[0]


def test_a_step_must_read_k_and_v_once_for_every_position() -> None:
    # 8 KV heads x 128 x 2 bytes, K and V
    assert decode_bytes(LLAMA_8B, [1]) == 8 * 128 * 2 * 2 == 4096
    assert decode_bytes(LLAMA_8B, [8192] * 16) == 512 << 20
    assert decode_bytes(Shape(64, 8, 128, 16, torch.float8_e4m3fn), [100]) == 204_800
    assert LLAMA_8B.group == 4 and LLAMA_8B.block_bytes == 64 << 10


def test_prefill_counts_the_positions_that_each_query_sees() -> None:
    shape = Shape(5, 1, 24, 7)
    seen = sum(position + 1 for position in range(16, 21))
    assert prefill_flops(shape, [21, 21], 5) == 2 * 4 * 5 * 24 * seen


def test_the_grid_covers_everything_and_begins_with_corners_and_what_is_judged() -> None:
    points = grid([4, 8], gpu_attention.BATCHES, gpu_attention.CONTEXTS)
    assert len(points) == len(set(points)) == 2 * 7 * 8
    corners = 2 * len(gpu_attention.CORNERS)
    assert {(p.batch, p.context) for p in points[:corners]} == set(gpu_attention.CORNERS)
    judged = [gpu_attention.has_target(point) is not None for point in points[corners:]]
    assert judged == sorted(judged, reverse=True)
    sizes = [p.batch * p.context for p in points[:corners]]
    assert sizes == sorted(sizes)


def test_a_pool_and_contiguous_tokens_fit_what_the_card_has() -> None:
    whole = 64 * (128 << 10)
    for free, layers in ((139 * GIB, 2), (79 * GIB, 1), (20 * GIB, 1)):
        tokens, found = fitting(free, LLAMA_8B, whole)
        assert found == layers
        assert (found + 1) * tokens * LLAMA_8B.token_bytes <= free
        assert tokens == whole or tokens * LLAMA_8B.token_bytes > free // 3
        assert tokens % LLAMA_8B.block_size == 0
    assert fitting(139 * GIB, LLAMA_8B, 1 << 16) == (1 << 16, 32)


def test_a_figure_is_its_worst_point() -> None:
    found = [
        (Point(4, 8, 8 << 10), {"of_read": 95.0, "vs_sdpa": 2.0}),
        (Point(8, 64, 128 << 10), {"of_read": 88.0, "vs_sdpa": 3.0}),
        (Point(4, 1, 1 << 10), {"of_read": 10.0, "vs_sdpa": 0.9, "vs_flashinfer": 1.1}),
    ]
    assert figures_of(found) == {
        "decode_b8_8k": 88.0,
        "decode_vs_sdpa": 0.9,
        "decode_vs_flashinfer": 1.1,
    }
    assert figures_of([]) == {}


def test_lengths_are_spread_evenly_in_ratio_about_their_middle() -> None:
    lengths = spread(32, 2048, 10)
    assert len(lengths) == 32 and lengths == tuple(sorted(lengths))
    assert lengths[-1] / lengths[0] == pytest.approx(10, rel=1e-2)
    assert lengths[0] * lengths[-1] == pytest.approx(2048**2, rel=1e-2)


def test_a_step_gives_every_sequence_blocks_of_its_own() -> None:
    step = make_step(StandIn(), Shape(4, 1, 16, 16), [33, 16, 1], 9)
    used = [*step.tables[0, :3].tolist(), int(step.tables[1, 0]), int(step.tables[2, 0])]
    assert len(set(used)) == 5
    in_a_row = make_step(StandIn(), Shape(4, 1, 16, 16), [33, 16], 9, scattered=False)
    assert in_a_row.tables.tolist() == [[0, 1, 2], [3, 0, 0]]
    with pytest.raises(ValueError, match="5 blocks wanted, the pool has 4"):
        make_step(StandIn(), Shape(4, 1, 16, 16), [33, 16, 1], 4)


def test_a_document_in_common_is_the_first_sequences_blocks() -> None:
    step = make_step(StandIn(), Shape(4, 1, 16, 16), [40, 40, 40], 9)
    shared, prefixes = share(step, 32, 16)
    assert shared.tables[:, :2].tolist() == [step.tables[0, :2].tolist()] * 3
    assert shared.tables[:, 2].tolist() == step.tables[:, 2].tolist()
    assert (prefixes.members.tolist(), prefixes.lens.tolist()) == ([[0, 1, 2]], [32])


def test_both_layouts_are_the_same_memory() -> None:
    pool = Pool(StandIn(), Shape(4, 2, 16, 16, torch.float16), 6, 3)
    planes = pool.layer_major()
    assert planes.keys(0).data_ptr() == pool.keys(0).data_ptr()
    assert planes.values(2).shape == pool.values(2).shape == (6, 2, 16, 16)
    assert pool.keys(1).stride(0) == 3 * 2 * 2 * 16 * 16
    assert planes.keys(1).stride(0) == 2 * 16 * 16
    last = planes.values(2).data_ptr() + 6 * planes.values(2).stride(0) * 2
    assert last == pool.keys(0).data_ptr() + pool.nbytes


@interpreted
def test_a_kernel_that_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandIn()
    pool = Pool(gpu, Shape(4, 1, 16, 16, torch.float16), 6, 1)
    step = make_step(gpu, pool.shape, [20, 40], 6)
    assert check_decode(pool, step) < 2e-2
    right = gpu_bandwidth.read_all
    wrong = lambda data, programs: right(data[: len(data) // 2], programs)  # noqa: E731
    monkeypatch.setattr(gpu_bandwidth, "read_all", wrong)
    with pytest.raises(RuntimeError, match="lost something"):
        gpu_bandwidth.measure_read(gpu)
    with pytest.raises(RuntimeError, match="off by"):
        same_rows(torch.tensor([1.0, float("nan")]), torch.zeros(2), 2.0)
    monkeypatch.setattr(
        gpu_pool, "paged_decode", lambda query, *rest, **more: torch.zeros_like(query)
    )
    with pytest.raises(RuntimeError, match="off by"):
        check_decode(pool, step)
    point = gpu_prefill.Point(4, 2, 5, 21)
    _, query, tables = gpu_prefill.ours(gpu, pool, point)
    with pytest.raises(RuntimeError, match="off by"):
        gpu_prefill.check(pool, point, torch.zeros_like(query), query, tables)


def test_copies_that_do_not_arrive_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = next(iter(gpu_copies.TINY.values()))
    with gpu_copies.Rig(StandIn(), layout, 4) as rig:
        gpu_copies.check(rig)
        lost = Flight(1, rig.device.signal)
        lost.fail_rest(OSError("the bus is gone"))
        with pytest.raises(RuntimeError, match="the bus is gone"):
            rig.finish(lost)
        monkeypatch.setattr(rig, "demote", lambda low, top: Flight(0, rig.device.signal))
        with pytest.raises(RuntimeError, match="a demoted block has other bytes"):
            gpu_copies.check(rig)
        monkeypatch.setattr(rig, "promote", lambda low, top: Flight(0, rig.device.signal))
        rig.hbm.flat.zero_()
        rig.host[-1] = 1
        with pytest.raises(RuntimeError, match="a promoted block has other bytes"):
            gpu_copies.check(rig)


def test_one_other_bit_of_one_logit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {3: torch.ones(5), 1: torch.zeros(5)}
    monkeypatch.setattr(Runner, "run", lambda runner, work: rows)
    digests = []
    with gpu_exact.Trail() as trail:
        for other in (rows[3], rows[3].clone(), torch.nextafter(rows[3], torch.full((5,), 2.0))):
            rows[3] = other
            Runner.run(cast(Runner, None), [])
            digests.append(trail.take())
        assert trail.take() != digests[0], "nothing has run since"
    assert digests[0] == digests[1] != digests[2]
    Runner.run(cast(Runner, None), [])
    assert trail.take() not in digests, "it watches no longer"


def test_hits_are_asked_for_about_every_boundary() -> None:
    lengths = gpu_exact.hit_lengths(256, 5 * 256 + 3)
    for boundary in (16, 256, 512, 1280):
        assert {boundary - 1, boundary, boundary + 1} <= set(lengths)
    assert {256 - 16, 256 + 16} <= set(lengths)
    assert lengths == sorted(set(lengths)) and lengths[-1] <= 5 * 256 + 3


def test_a_hit_from_another_tier_is_no_figure_of_this_one() -> None:
    llm = SimpleNamespace(layout=SimpleNamespace(block_size=16))
    prompt = gpu_ttft.Prompt(cast(LLM, llm), np.arange(65, dtype=np.int32))
    tiers = {name: tier for name, (tier, _) in gpu_ttft.TIERS.items()}
    hits = {name: SimpleNamespace(hit_tokens={tier: 64}) for name, tier in tiers.items()}
    prompt.last = cast(dict[str, Completion], hits)
    prompt.check()
    for wrong in ({TierId.HBM: 64}, {TierId.DRAM: 48}, {TierId.DRAM: 48, TierId.HBM: 16}):
        hits["dram"] = SimpleNamespace(hit_tokens=wrong)
        with pytest.raises(RuntimeError, match="dram: .* want 64"):
            prompt.check()


def test_eight_bit_floats_are_filled_with_numbers() -> None:
    values = torch.empty(4096, dtype=torch.float8_e4m3fn)
    fill(values)
    assert bool(torch.isfinite(values.float()).all()) and len(set(values.tolist())) > 50


def test_the_generated_model_has_a_billion_parameters_and_the_engines_names(
    tmp_path: Path,
) -> None:
    assert 1.0e9 < ONE_BILLION.parameters < 1.1e9
    directory = write_model(tmp_path / "m", TINY, torch.device("cpu"), torch.float32)
    config = read_config(directory)
    weights = load_weights(directory, config, torch.float32)
    assert len(weights.layers) == TINY.layers and config.max_positions == TINY.positions
    again = write_model(tmp_path / "n", TINY, torch.device("cpu"), torch.float32)
    same = (directory / "model.safetensors").read_bytes() == (
        again / "model.safetensors"
    ).read_bytes()
    assert same


def test_what_stops_a_gpu_from_being_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(NoGpu, match="TRITON_INTERPRET is set"):
        open_gpu(dry=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(NoGpu, match="needs TRITON_INTERPRET=1"):
        open_gpu(dry=True)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NoGpu, match="is a CPU build") as caught:
        open_gpu(dry=False)
    assert caught.value.is_broken
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(NoGpu, match="newer than the driver"):
        open_gpu(dry=False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(NoGpu, match="no GPU on this machine") as caught:
        open_gpu(dry=False)
    assert not caught.value.is_broken
    assert describe()["torch"] == torch.__version__


def test_copies_that_fail_beside_decode_fail_the_bench() -> None:
    class Broken:
        nbytes = 1

        def start_both(self) -> None:
            raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        with gpu_copies.Traffic(cast(gpu_copies.Rig, Broken())):
            pass


def test_no_gpu_test_starts_when_time_is_up() -> None:
    item = cast(pytest.Item, object())
    clerk = Clerk(Budget(60.0))
    assert clerk.pytest_runtest_protocol(item) is None
    late = Clerk(Budget(0.0))
    assert late.pytest_runtest_protocol(item) is True
    assert (clerk.not_run, late.not_run) == (0, 1)


def test_outcomes_of_gpu_tests_are_counted_once() -> None:
    def report(when: str, outcome: str) -> pytest.TestReport:
        return pytest.TestReport("a_test", ("f", 1, "t"), {}, outcome, None, when)  # type: ignore[arg-type]

    clerk = Clerk(Budget(60.0))
    for when in ("setup", "call", "teardown"):
        clerk.pytest_runtest_logreport(report(when, "passed"))
    clerk.pytest_runtest_logreport(report("call", "failed"))
    clerk.pytest_runtest_logreport(report("setup", "skipped"))
    assert (clerk.passed, clerk.skipped) == (1, 1)
    assert clerk.failed == ["a_test (call)"]
