"""What the demo's processes measured, as values that travel between them as lines of JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum


class Mode(StrEnum):
    EMBEDDED = "embedded"
    SIDECAR = "sidecar"


class State(StrEnum):
    """Where the document's KV is when the question comes."""

    COLD = "cold"
    NVME = "nvme"
    DRAM = "dram"
    HBM = "hbm"


@dataclass(frozen=True)
class Ask:
    """One question asked once. `session` counts the fresh processes of a mode, from 0."""

    document: str
    mode: Mode
    state: State
    session: int
    question: str
    prompt_tokens: int
    cached_tokens: int
    hit_tokens: Mapping[str, int]
    ttft_s: float
    nvme_bytes_read: int
    answer: str


@dataclass(frozen=True)
class Raw:
    """The same bytes as one restore, read raw and copied once, in one process."""

    mode: Mode
    session: int
    nbytes: int
    read_s: float
    memcpy_s: float


@dataclass(frozen=True)
class Direct:
    """Whether reads of one process's store went past the page cache."""

    mode: Mode
    session: int
    asked: bool
    cached_share: float


@dataclass(frozen=True)
class Baseline:
    """transformers' own prefill of the same prompt, with the same threads."""

    document: str
    prompt_tokens: int
    prefill_s: float


Result = Ask | Raw | Direct | Baseline

_KINDS: dict[str, type[Ask] | type[Raw] | type[Direct] | type[Baseline]] = {
    "ask": Ask,
    "raw": Raw,
    "direct": Direct,
    "baseline": Baseline,
}
_ENUMS = {"mode": Mode, "state": State}


def to_line(result: Result) -> str:
    """One line of JSON."""
    return json.dumps({"kind": type(result).__name__.lower(), **asdict(result)})


def from_line(line: str) -> Result:
    """The value behind a line. Raises `ValueError` (or `KeyError`) for any other line."""
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    for name, enum in _ENUMS.items():
        if name in fields:
            fields[name] = enum(fields[name])
    return kind(**fields)
