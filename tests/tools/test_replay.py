"""`kvtier replay`: what it counts adds up, and it says what is wrong with a trace or an option."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier.tools.replay
from kvtier.index.words import ROOT_KEY, BlockKey, TierId
from kvtier.tiers.contracts import FAILED, LANDED, Fetch, Flight, Put, Signal
from kvtier.tiers.nvme.budget import DAY_S, WriteBudget
from kvtier.tiers.pool import SlotPool
from kvtier.tools.replay.curve import spread, trace_curve
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.world import LeafStore, Setup
from kvtier.tools.traces import TraceFile
from tests.tools.conftest import Run
from tests.tools.sample_trace import lines

SAMPLE = Path(kvtier.tools.replay.__file__).with_name("sample.jsonl")
SMALL = ("--hbm", "20", "--dram", "60", "--nvme", "200")
QUICK = ("--curve", "0", "--json")
NAMESPACE = bytes(32)


def test_the_sample_trace_is_what_its_generator_makes() -> None:
    assert SAMPLE.read_text().splitlines() == list(lines())


def replayed(setup: Setup) -> Replay:
    replay = Replay(setup)
    for request in TraceFile(SAMPLE, strict=True):
        replay.request(request.timestamp_s, request.blocks)
    replay.world.cache.check()
    return replay


@pytest.mark.parametrize("writeback_s", [None, 30.0])
@pytest.mark.parametrize(("hbm", "dram", "nvme"), [(20, 60, 200), (30, 40, 90), (20, 0, 150)])
def test_what_came_into_a_tier_has_left_it_or_stands_there(
    hbm: int, dram: int, nvme: int, writeback_s: float | None
) -> None:
    replay = replayed(Setup(hbm, dram, nvme, writeback_s=writeback_s))
    done = replay.outcome()
    above = "dram" if dram else "nvme"
    computed = done.asked - done.truncated - sum(done.hits.values())
    came = {TierId.HBM: computed + done.moved[f"{above} > hbm"]}
    if dram:
        came[TierId.DRAM] = done.moved["hbm > dram"] + done.moved["nvme > dram"]
    came[TierId.NVME] = done.moved[f"{'dram' if dram else 'hbm'} > nvme"]
    assert came == {tier: done.evicted[tier] + done.resident[tier] for tier in came}
    assert all(done.hits[tier] > 0 and done.evicted[tier] > 0 for tier in came)
    assert done.resident[TierId.NVME] <= nvme
    assert (done.written_back > 0) == (writeback_s is not None and dram > 0)
    assert replay.world.store is not None
    replay.world.store.check()


def test_what_runs_keeps_its_blocks_until_their_room_is_needed() -> None:
    paths = [np.arange(8 * i, 8 * i + n, dtype=np.int32) for i, n in enumerate((6, 6, 6, 3, 18))]
    replay = Replay(Setup(20, 0, 0), running=3)
    leases = []
    for path in paths:
        replay.request(0.0, path)
        leases.append(replay.world.cache.statistics().leases)
    assert leases == [1, 2, 2, 2, 1]
    assert replay.outcome().evicted == {TierId.HBM: 19}


def test_blocks_that_waiting_requests_will_ask_for_are_spared() -> None:
    a, b, c = (np.arange(8 * i, 8 * i + 8, dtype=np.int32) for i in range(3))
    steps = [(a, []), (b, [c, a]), (c, [a]), (a, [])]
    for lookahead, hits in ((0, 0), (2, 8)):
        replay = Replay(Setup(16, 0, 0))
        for path, waiting in steps:
            replay.request(0.0, path, waiting[:lookahead])
        assert sum(replay.outcome().hits.values()) == hits


def test_with_room_for_all_everything_that_was_seen_before_is_a_hit(run: Run) -> None:
    said = run("replay", SAMPLE, "--hbm", "5000", "--dram", "0", "--nvme", "0", *QUICK)
    found = said.summary
    assert said.code == 0
    assert found["hits"] == found["ideal_hits"] == found["belady_hits"] == 2150
    assert found["tiers"]["hbm"]["evicted"] == 0 and list(found["tiers"]) == ["hbm"]


def test_what_is_admitted_may_be_learned() -> None:
    plain = replayed(Setup(20, 60, 200, writeback_s=None))
    learned = replayed(Setup(20, 60, 200, writeback_s=None, nvme_admission="learned"))
    assert plain.world.cache.statistics().sieve is None
    sieve = learned.world.cache.statistics().sieve
    assert sieve is not None and sieve.admitted > 0 and sieve.refused > 0


def test_the_command_prints_tables_a_curve_a_chart_and_json(run: Run, tmp_path: Path) -> None:
    chart = tmp_path / "curve.png"
    said = run(
        *("replay", SAMPLE, *SMALL, "--policy", "adaptive", "--dram-policy", "arc"),
        *("--running", "3", "--lookahead", "2"),
        *("--block-bytes", "2MiB", "--curve", "4", "--processes", "1", "--png", chart, "--json"),
    )
    assert said.code == 0, said.err
    found = said.summary
    assert (found["requests"], found["blocks_asked"], found["bad_lines"]) == (240, 2989, [])
    assert [tier["policy"] for tier in found["tiers"].values()] == ["adaptive", "arc", "lru"]
    assert found["hits"] == sum(tier["hits"] for tier in found["tiers"].values())
    assert 0 < found["hits"] < found["belady_hits"] <= found["ideal_hits"]
    assert found["tokens_asked"] == 16 * found["blocks_asked"]
    assert sum(found["tokens_hit"].values()) == 16 * found["hits"]
    assert found["ssd_written_bytes"] == found["ssd_written_blocks"] << 21
    assert found["moved_bytes"] == {way: n << 21 for way, n in found["moved_blocks"].items()}
    curve = found["miss_ratio_curve"]
    assert curve["capacity_blocks"] == [10, 38, 146, 560]
    assert set(curve) == {"capacity_blocks", "lru", "arc", "adaptive", "belady", "infinite"}
    for rule in ("lru", "arc", "adaptive", "belady"):
        assert curve[rule] == sorted(curve[rule], reverse=True)
        assert all(m >= b for m, b in zip(curve[rule], curve["belady"], strict=True))
    for words in ("SSD writes", "Belady", "miss ratio", "leaf-LRU", "400.0 MiB"):
        assert words in said.out
    drawn = chart.read_bytes()
    width, height = (int.from_bytes(drawn[i : i + 4], "big") for i in (16, 20))
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n" and width >= 1200 and height >= 700


def test_several_processes_find_what_one_does() -> None:
    requests = [request.blocks for request in TraceFile(SAMPLE)][:60]
    one, two = (
        trace_curve(requests, [20, 50], ["arc"], processes=n, progress=lambda done, of: None)
        for n in (1, 2)
    )
    assert one == two and one.hits["arc"][0] > 0


def test_capacities_spread_around_the_given_ones() -> None:
    assert spread([1000, 4000, 32000], 8)[0] == 500
    assert spread([1000, 4000, 32000], 8)[-1] == 74000
    assert spread([1], 3) == (1, 2)
    assert spread([10], 1) == (5,)


ROW: Mapping[str, Any] = {
    "timestamp": 1.0,
    "input_length": 32,
    "block_size": 16,
    "hash_ids": [7, 8],
}


def test_malformed_lines_are_named_and_counted_or_end_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    rows = [json.dumps(ROW), "{not json", json.dumps(ROW), '{"hash_ids": 3}']
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    said = run("replay", path, *SMALL, *QUICK)
    assert said.code == 0
    assert said.summary["bad_lines"] == [2, 4] and said.summary["requests"] == 2
    assert said.summary["hits"] == 2
    told = [line.split(", ")[1] for line in said.err.splitlines()]
    assert [words.split(":")[0] for words in told] == ["line 2", "line 4"]
    assert "line 2: " in run("replay", path, *SMALL, *QUICK, "--strict").complaint


def test_mooncake_and_ragpulse_are_read_too(run: Run, tmp_path: Path) -> None:
    mooncake = {"timestamp": 27000, "input_length": 1030, "output_length": 1, "hash_ids": [5, 6, 9]}
    ragpulse = {
        "timestamp": 1.5,
        "input_length": 99,
        "output_length": 9,
        "hash_ids": {"sys_prompt": [1], "passages_ids": [2, 3], "user_input": [4]},
    }
    for row, blocks, tokens in ((mooncake, 2, 1024), (ragpulse, 4, 0)):
        path = tmp_path / "t"
        path.write_text(f"{json.dumps(row)}\n" * 3)
        found = run("replay", path, *SMALL, *QUICK).summary
        assert (found["blocks_asked"], found["hits"]) == (3 * blocks, 2 * blocks)
        assert found["tokens_asked"] == 3 * tokens


def test_requests_without_a_whole_block_are_requests(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps({**ROW, "input_length": 3}))
    found = run("replay", path, *SMALL, "--json", "--processes", "1").summary
    assert (found["requests"], found["blocks_asked"], found["hit_ratio"]) == (1, 0, 0)


BAD = [
    (("--hbm", "8GiB"), "--hbm: '8GiB' is no number of blocks; for a size, add --block-bytes"),
    (("--dram", "1KiB", "--block-bytes", "2KiB"), "--dram: '1KiB' is less than one block of 2048"),
    (("--nvme", "much", "--block-bytes", "2KiB"), "--nvme: 'much' is not a size"),
    (("--hbm", "999999999999"), "--hbm: 999,999,999,999 blocks; a replay takes at most"),
    (("--hbm", "0", "--dram", "0"), "--hbm and --dram: both are 0"),
    (("--policy", "magic"), "--policy: 'magic' given, want one of lru, arc, adaptive"),
    (("--dram-policy", "magic"), "--dram-policy: 'magic' given"),
    (("--png", "x.png", "--curve", "0"), "--png: there is no curve to draw"),
    (("--png", "nowhere/x.png"), "--png: there is no directory nowhere"),
]


@pytest.mark.parametrize(("given", "what"), BAD)
def test_a_bad_option_is_named_before_anything_is_read(
    run: Run, tmp_path: Path, given: tuple[str, ...], what: str
) -> None:
    assert what in run("replay", tmp_path / "absent", *given).complaint


def test_a_trace_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    assert "cannot be read" in run("replay", tmp_path / "absent").complaint


class StoreRig:
    """A replay's store of four blocks, paths of one-token blocks and a pool to put them from."""

    def __init__(self, budget_blocks: int = 100) -> None:
        self.now = 0.0
        budget = WriteBudget(budget_blocks, None, lambda: self.now)
        self.store = LeafStore(4, 1, 1, Signal(), budget)
        self.pool = SlotPool(TierId.DRAM, 16, 1)

    def put(self, path: list[int], start: int = 0, background: bool = False) -> list[int]:
        """The status of each block of the path from `start` on."""
        n = len(path) - start
        prefix, tokens = np.array(path[:start], np.int32), np.array(path[start:], np.int32)
        flight = self.store.put(
            Put(
                *(NAMESPACE, ROOT_KEY, tokens, keys(n), prefix),
                *(self.pool, np.arange(n, dtype=np.int32), None, background),
            )
        )
        return outcome(flight)

    def fetch(self, path: list[int], start: int = 0) -> list[int]:
        n = len(path) - start
        prefix, tokens = np.array(path[:start], np.int32), np.array(path[start:], np.int32)
        slots = np.arange(n, dtype=np.int32)
        flight = self.store.fetch(
            Fetch(NAMESPACE, ROOT_KEY, tokens, keys(n), prefix, self.pool, slots)
        )
        return outcome(flight)

    def lookup(self, path: list[int], start: int = 0) -> int | None:
        tokens = np.array(path, np.int32)
        return self.store.lookup(NAMESPACE, keys(len(path) - start), tokens).value


def keys(n: int) -> tuple[BlockKey, ...]:
    return (BlockKey(bytes(32)),) * n


def outcome(flight: Flight) -> list[int]:
    assert flight.done
    return [int(status) for status in flight.status]


def test_the_store_keeps_a_block_only_after_its_parent() -> None:
    rig = StoreRig()
    assert rig.put([1, 2, 3], start=1) == [FAILED, FAILED]
    assert rig.put([1, 2]) == [LANDED] * 2
    assert rig.put([1, 2, 3], start=2) == [LANDED]
    assert (rig.lookup([1, 2, 3, 4]), rig.lookup([1, 2, 3, 4], start=2)) == (3, 1)
    assert rig.lookup([1, 9, 3], start=2) == 0
    assert rig.fetch([1, 2, 3, 4], start=1) == [LANDED, LANDED, FAILED]
    assert (rig.store.num_fetched, rig.store.num_lost) == (2, 1)
    rig.store.check()


def test_a_full_store_gives_up_the_least_recent_leaf_and_never_the_puts_own_path() -> None:
    rig = StoreRig()
    rig.put([1, 2])
    rig.put([1, 3])
    rig.put([4])
    assert rig.fetch([1, 2]) == [LANDED] * 2
    assert rig.put([5]) == [LANDED]
    assert [rig.lookup(path) for path in ([1, 2], [1, 3], [4], [5])] == [2, 1, 1, 1]
    assert rig.put([1, 2, 6, 7, 8]) == [LANDED] * 4 + [FAILED]
    assert (len(rig.store), rig.store.num_evicted, rig.store.num_written) == (4, 3, 7)
    rig.store.check()


def test_blocks_that_the_store_holds_are_not_written_again() -> None:
    rig = StoreRig()
    rig.put([1, 2])
    assert rig.put([1, 2, 3]) == [LANDED] * 3
    assert rig.store.num_written == 3


def test_background_puts_keep_to_the_days_budget_and_others_count() -> None:
    rig = StoreRig(budget_blocks=2)
    assert rig.put([1]) == [LANDED]
    assert rig.put([1, 2, 3], background=True) == [LANDED, FAILED, FAILED]
    assert rig.put([1, 2], background=True) == [LANDED] * 2
    assert rig.put([1, 2, 3]) == [LANDED] * 3
    assert rig.put([9], background=True) == [FAILED]
    rig.now = float(DAY_S)
    assert rig.put([9], background=True) == [LANDED]
    assert (rig.store.num_written, rig.store.num_written_back) == (4, 2)
