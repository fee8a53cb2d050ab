"""The NVMe bench at toy sizes: that it runs on this tree, what it reports, how it scores."""

import json
import sys
from pathlib import Path

import pytest

from bench import nvme
from bench.nvme_corpus import open_or_build
from bench.nvme_drive import Cost, Turn, require_direct, score
from bench.nvme_scale import Effort

TINY = nvme.Plan(
    block_bytes=(36 << 10,),
    totals=((2 << 20, 2),),
    num_blocks=(1000, 128),
    effort=Effort(rounds=1, lookups=20, puts=10),
    peer_rounds=1,
)


def test_every_field_is_measured_and_only_the_stores_of_blocks_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        require_direct(tmp_path)
    except SystemExit as error:
        pytest.skip(str(error))
    kept = tmp_path / "kept"
    work = tmp_path / "work"
    work.mkdir()
    values = nvme.run(TINY, nvme.PARTS, work, kept, Path(sys.executable))
    measured = ["read_ratio", "write_ratio", "cpu_s_per_gib", "open_s_1k", "first_hit_s_1k"]
    for name in [*measured, "open_rss_mib", "lookup_scaling", "evict_scaling"]:
        value = values[name]
        assert isinstance(value, float) and value > 0, name
    assert values["direct"] is True
    assert values["peer"] is None and "lmcache: not installed" in capsys.readouterr().out
    assert [path.name for path in work.iterdir()] == ["small"]
    built = json.loads((kept / "built.json").read_text())
    assert built["num_blocks"] == 1024

    with pytest.raises(SystemExit, match="a store of 1,024 blocks, wanted 2,048"):
        open_or_build(kept, 2000)


def test_a_raw_plan_that_was_lucky_in_the_turns_that_chose_it_gains_nothing() -> None:
    steady, lucky = (8, 1 << 20), (32, 1 << 20)
    turns = []
    for number in range(10):
        luck = 0.5 if number % 2 == 0 else 1.5
        raw = {steady: Cost(1.0, 0.25), lucky: Cost(luck, 0.25)}
        turns.append(Turn(Cost(1.25, 0.5), raw))
    side = score(turns, 1 << 30)
    assert side.ratio.p20 == 0.8, "0.4 would be the lucky turns, scored by themselves"
    assert (side.cpu_s_per_gib, side.raw_cpu_s_per_gib) == (0.5, 0.25)
    assert side.gb_s == round((1 << 30) / 1.25 / 1e9, 3)
