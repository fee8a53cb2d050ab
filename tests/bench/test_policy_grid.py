"""What stands around the grid: the log of cells, the generated traces, where traces are found."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.policy import Trace, find_traces, with_own_names
from bench.policy_log import CellLog, code_digest
from bench.policy_traces import WORKLOADS, chained, generate
from kvtier.tools.errors import BadTrace


def test_a_cell_counts_again_for_the_same_code_only(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    with CellLog(path, "one") as log:
        log.put(("t", "ARC", 500), 7)
    with CellLog(path, "two") as log:
        assert ("t", "ARC", 500) not in log
        log.put(("t", "ARC", 500), 8)
    with CellLog(path, "one") as log:
        assert log["t", "ARC", 500] == 7
        assert ("t", "ARC", 1000) not in log and ("u", "ARC", 500) not in log


def test_a_line_cut_off_by_a_kill_costs_that_cell_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    with CellLog(path, "code") as log:
        log.put(("t", "ARC", 500), 7)
        log.put(("t", "ARC", 1000), 9)
    path.write_text(path.read_text()[:-9])
    with CellLog(path, "code") as log:
        assert ("t", "ARC", 500) in log and ("t", "ARC", 1000) not in log
        log.put(("t", "ARC", 1000), 9)
    assert [json.loads(line)["hits"] for line in path.read_text().splitlines()] == [7, 9]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text('{"trace": "t"}\nto be kept')
    with pytest.raises(ValueError, match=r"notes, line 1: is not a cell of the grid; name another"):
        CellLog(path, "code")
    assert path.read_text() == '{"trace": "t"}\nto be kept'


def test_code_is_the_same_if_names_and_contents_are(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x")
    two.write_text("y")
    before = code_digest([one, two])
    assert code_digest([two, one]) == before
    two.write_text("z")
    assert code_digest([one, two]) != before


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_generated_trace_is_chained_and_the_same_every_time(name: str) -> None:
    requests = generate(name, 300, seed=3, scale=1)
    assert len(requests) == 300
    above: dict[int, int] = {}
    for blocks in requests:
        assert blocks.dtype == np.int32 and len(blocks)
        for parent, child in zip([-1, *blocks.tolist()], blocks.tolist(), strict=False):
            assert above.setdefault(child, parent) == parent
    again = generate(name, 300, seed=3, scale=1)
    assert all(np.array_equal(a, b) for a, b in zip(requests, again, strict=True))
    assert Trace(name, requests).digest == Trace("other", again).digest


def test_equal_contents_behind_unequal_prefixes_are_different_blocks() -> None:
    told = [blocks.tolist() for blocks in chained([[5, 6], [7, 6], [5, 6, 6]])]
    assert told == [[0, 1], [2, 3], [0, 1, 4]]


def test_traces_of_one_name_are_told_apart() -> None:
    one, two = (Trace("t", generate("scan", n, scale=1)) for n in (2, 3))
    assert [trace.name for trace in with_own_names([one, two, two])] == ["t", "t-2", "t-3"]
    assert one.digest != two.digest


def test_without_any_trace_the_folder_that_was_looked_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.policy.ROOT", tmp_path / "project")
    with pytest.raises(BadTrace, match=r"none in .*shared.traces; name some, or try --generated"):
        find_traces([])
    assert find_traces([tmp_path / "mine"]) == [tmp_path / "mine"]
    folder = tmp_path / "shared" / "traces"
    folder.mkdir(parents=True)
    (folder / "b.jsonl.gz").touch()
    (folder / "a.jsonl").touch()
    (folder / "README.md").touch()
    assert [path.name for path in find_traces([])] == ["a.jsonl", "b.jsonl.gz"]
