"""Traces: the three forms, and lines that make no sense."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.tools.errors import BadTrace
from kvtier.tools.traces import TraceFile

PLAIN: dict[str, Any] = {
    "timestamp": 2.5,
    "input_length": 70,
    "output_length": 4,
    "block_size": 32,
    "hash_ids": [9, 7, 8],
}


def write(path: Path, *rows: Any, packed: bool = False) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_only_whole_blocks_count_and_equal_ids_stay_equal(tmp_path: Path, packed: bool) -> None:
    again = {**PLAIN, "input_length": 96, "hash_ids": [9, 7, 5]}
    first, second = TraceFile(write(tmp_path / "t", PLAIN, again, packed=packed))
    assert first.blocks.tolist() == [0, 1] and first.block_tokens == (32, 32)
    assert second.blocks.tolist() == [0, 1, 2]
    assert (first.line, first.timestamp_s, first.input_tokens, first.output_tokens) == (
        *(1, 2.5, 70),
        4,
    )


def test_mooncake_says_milliseconds_and_no_block_size(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]}
    (request,) = TraceFile(write(tmp_path / "t", row))
    assert request.timestamp_s == 27.482
    assert request.block_tokens == (512, 512)


def test_contents_are_chained_into_prefixes(tmp_path: Path) -> None:
    """The same passage behind another is another block."""

    def row(*passages: int) -> dict[str, Any]:
        ids = {"sys_prompt": [1], "passages_ids": list(passages), "user_input": []}
        return {"timestamp": "3", "input_length": 10, "output_length": 1, "hash_ids": ids}

    one, two, three = TraceFile(write(tmp_path / "t", row(5, 6), row(6, 5), row(5, 7)))
    assert one.blocks.tolist() == [0, 1, 2]
    assert two.blocks.tolist() == [0, 3, 4]
    assert three.blocks.tolist() == [0, 1, 5]


def test_blocks_of_their_own_length(tmp_path: Path) -> None:
    row = {**PLAIN, "block_tokens": [3, 500, 9]}
    (request,) = TraceFile(write(tmp_path / "t", row))
    assert request.block_tokens == (3, 500, 9) and len(request.blocks) == 3


BAD: list[tuple[Any, str]] = [
    ("{", "Expecting"),
    ("[1]", "is not an object"),
    ({k: v for k, v in PLAIN.items() if k != "hash_ids"}, "no field 'hash_ids'"),
    ({**PLAIN, "input_length": -1}, "`input_length` is not a count"),
    ({**PLAIN, "input_length": True}, "`input_length` is not a count"),
    ({**PLAIN, "block_size": 0}, "`block_size` is less than 1"),
    ({**PLAIN, "hash_ids": "abc"}, "`hash_ids` is not a list of ids"),
    ({**PLAIN, "hash_ids": [1.5]}, "`hash_ids` is not a list of ids"),
    ({**PLAIN, "block_tokens": [1]}, "differ in length"),
    ({**PLAIN, "timestamp": "noon"}, "could not convert"),
    ('{"timestamp": NaN, "input_length": 1, "block_size": 1, "hash_ids": [1]}', "not a number"),
]


@pytest.mark.parametrize(("row", "what"), BAD)
def test_a_bad_line_is_told_by_number_and_left_out_or_ends_it(
    tmp_path: Path, row: Any, what: str
) -> None:
    path = write(tmp_path / "t", PLAIN, row, "", PLAIN)
    told: list[tuple[int, str]] = []
    trace = TraceFile(path, complain=lambda line, why: told.append((line, why)))
    assert [request.line for request in trace] == [1, 4]
    assert trace.num_bad == 1
    assert told[0][0] == 2 and what in told[0][1]
    with pytest.raises(BadTrace, match="line 2: "):
        list(TraceFile(path, strict=True))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read"):
        list(TraceFile(tmp_path / "absent"))
    with pytest.raises(BadTrace, match="holds no request"):
        list(TraceFile(write(tmp_path / "t", "")))
    cut = write(tmp_path / "u", *[PLAIN] * 400, packed=True)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(BadTrace, match="cannot be read after line"):
        list(TraceFile(cut))
