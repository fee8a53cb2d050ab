"""Read request traces: which blocks each request asked for. Knows no cache and no tokens.

Three forms are understood, each plain or gzip:

    JSON lines   `timestamp` (s), `input_length`, `output_length`, `hash_ids` (chained block ids),
                 and `block_size` or `block_tokens` (one number a block)
    Mooncake     the same without `block_size`: blocks of 512 tokens, `timestamp` in milliseconds
    RAGPulse     `hash_ids` is an object of lists of content ids, which are chained here

Block ids are chained: equal ids mean equal tokens and an equal prefix. Only whole blocks count: in
the first two forms the last id of a request may stand for a part of one and is then left out.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.index.words import Tokens
from kvtier.tools.errors import BadTrace

MOONCAKE_BLOCK = 512
_RAGPULSE_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


@dataclass(frozen=True)
class TraceRequest:
    """One request. `blocks`: ids of its whole blocks, int32 `[n]`, numbered in order of first
    appearance; `block_tokens`: tokens of each (0 where the trace does not say)."""

    line: int
    timestamp_s: float
    input_tokens: int
    output_tokens: int
    blocks: Tokens
    block_tokens: tuple[int, ...]


class TraceFile:
    """One trace. Iterate over it, once or again; it is read as a stream.

    A malformed line is told to `complain(line number, what is wrong)` and left out; with `strict`
    it raises `BadTrace`. `num_bad` counts those of the last pass.
    """

    def __init__(
        self,
        path: Path,
        *,
        strict: bool = False,
        complain: Callable[[int, str], None] = lambda line, what: None,
    ) -> None:
        self.path = path
        self.num_bad = 0
        self._strict = strict
        self._complain = complain

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `BadTrace` if the file cannot be read or holds no request at all."""
        self.num_bad, good = 0, 0
        numbers: dict[Any, int] = {}
        line = 0
        try:
            with self._open() as file:
                for line, text in enumerate(file, 1):
                    if not text.strip():
                        continue
                    try:
                        request = _parse(json.loads(text), line, numbers)
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        self._bad(line, error)
                        continue
                    good += 1
                    yield request
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise BadTrace(
                f"trace {self.path}: cannot be read after line {line} ({error}); "
                "give a JSON-lines file, plain or gzip"
            ) from error
        if not good:
            raise BadTrace(f"trace {self.path}: holds no request; look at its first line")

    def _open(self) -> Any:
        with self.path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed else open
        return opener(self.path, "rt", encoding="utf-8")

    def _bad(self, line: int, error: Exception) -> None:
        self.num_bad += 1
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        if self._strict:
            raise BadTrace(f"trace {self.path}, line {line}: {what}; mend or leave out the line")
        self._complain(line, what)


def _parse(row: Any, line: int, numbers: dict[Any, int]) -> TraceRequest:
    if not isinstance(row, dict):
        raise ValueError("is not an object")
    given, total = row["hash_ids"], _count(row, "input_length")
    output = _count(row, "output_length") if "output_length" in row else 0
    moment = float(row["timestamp"])
    if isinstance(given, dict):
        ids: list[Any] = []
        prefix: Any = None
        for part in _RAGPULSE_PARTS:
            for content in given.get(part) or ():
                prefix = (prefix, part, content)
                ids.append(numbers.setdefault(prefix, len(numbers)))
                prefix = ids[-1]
        return _request(line, moment, total, output, ids, [0] * len(ids))
    if not isinstance(given, list) or not all(isinstance(id, (int, str)) for id in given):
        raise ValueError("`hash_ids` is not a list of ids")
    if "block_tokens" in row:
        tokens = [int(n) for n in row["block_tokens"]]
        if len(tokens) != len(given):
            raise ValueError("`block_tokens` and `hash_ids` differ in length")
    else:
        size = _count(row, "block_size") if "block_size" in row else MOONCAKE_BLOCK
        moment = moment if "block_size" in row else moment / 1000
        if size < 1:
            raise ValueError("`block_size` is less than 1")
        given = given[: total // size]
        tokens = [size] * len(given)
    ids = [numbers.setdefault(id, len(numbers)) for id in given]
    return _request(line, moment, total, output, ids, tokens)


def _request(
    line: int, moment: float, total: int, output: int, ids: list[int], tokens: list[int]
) -> TraceRequest:
    if not np.isfinite(moment):
        raise ValueError("`timestamp` is not a number")
    return TraceRequest(line, moment, total, output, np.array(ids, np.int32), tuple(tokens))


def _count(row: dict[str, Any], field: str) -> int:
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"`{field}` is not a count")
    return value
