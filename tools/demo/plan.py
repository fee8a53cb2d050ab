"""What a process of the demo is told to do: one frozen value, handed over as JSON."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvtier.tools.demo.results import Mode
from kvtier.tools.options import Tiers

MIB, GIB = 1 << 20, 1 << 30
HBM_BYTES, DRAM_BYTES, NVME_BYTES = 512 * MIB, 1 * GIB, 4 * GIB

COMPARED = "A"
"""The letter of the question whose answers are compared between all states and modes."""


@dataclass(frozen=True)
class Subject:
    """A document on disk and the question about it."""

    name: str
    path: str
    question: str


@dataclass(frozen=True)
class Plan:
    """`session` 0 measures every state; later ones only what needs a fresh process."""

    model: str
    threads: int
    mode: Mode
    session: int
    subjects: tuple[Subject, ...]
    store: str
    socket: str | None = None

    @property
    def tiers(self) -> Tiers:
        return Tiers(
            HBM_BYTES,
            DRAM_BYTES,
            NVME_BYTES,
            Path(self.store) if self.socket is None else None,
            None if self.socket is None else Path(self.socket),
        )

    @property
    def segments(self) -> list[Path]:
        """The store's files of KV bytes."""
        return sorted(path for path in (Path(self.store) / "segments").iterdir() if path.is_file())

    def restarted(self, mode: Mode, session: int, socket: Path | None = None) -> "Plan":
        """The same questions for another process."""
        path = None if socket is None else str(socket)
        return replace(self, mode=mode, session=session, socket=path)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        fields = json.loads(text)
        fields["mode"] = Mode(fields["mode"])
        fields["subjects"] = tuple(Subject(**each) for each in fields["subjects"])
        return cls(**fields)
