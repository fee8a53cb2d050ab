"""Whatever breaks on the way down: puts fail, no space is lost, and the store serves on.

Every call that the write path makes raises in turn what nobody expects of it (no error of a drive):
calls on files by way of the file layer, all others before they do anything, or when they have done
it. Some cost their records only; where it is not known how far it came, the store is out until the
catalogue was read again.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

from kvtier.tiers.nvme.budget import WriteBudget
from kvtier.tiers.nvme.catalogue import Catalogue
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.core import Core
from kvtier.tiers.nvme.encoder import Encoder
from kvtier.tiers.nvme.files import Files
from kvtier.tiers.nvme.health import Health
from kvtier.tiers.nvme.pace import Meter
from kvtier.tiers.nvme.puts import Puts
from kvtier.tiers.nvme.segments import Segments
from tests.nvme.faults import FaultyFiles
from tests.nvme.rig import Rig, branch, disk_takes, num_landed

CAPACITY = 160 << 10
ERRORS = (MemoryError, RuntimeError)

FILE_CALLS = ("open", "sync_directory", "allocate", "pwritev", "fdatasync", "punch", "unlink")

CALLS: tuple[tuple[type, str], ...] = (
    (Catalogue, "find"),
    (Catalogue, "commit"),
    (Core, "commit"),
    (Core, "make_room"),
    (Core, "reclaim"),
    (Core, "abandon"),
    (Encoder, "encode"),
    (Health, "admission"),
    (Health, "write_worked"),
    (Meter, "published"),
    (Puts, "next_lot"),
    (Puts, "plan"),
    (Puts, "land"),
    (Puts, "fail"),
    (Segments, "allocate"),
    (Segments, "retire"),
    (Segments, "settled"),
    (Segments, "sealed"),
    (WriteBudget, "charge"),
)
"""Everything else that the writer calls, where it may not be known afterwards what was done."""


class Breakage:
    """The `at`-th of the calls it is put into raises, once, and after it has done its work if
    `late`. `fired` counts."""

    def __init__(self, error: Exception, at: int, *, late: bool) -> None:
        self._error = error
        self._left = at
        self._late = late
        self._guard = Lock()
        self._armed = False
        self.fired = 0

    def arm(self, armed: bool) -> None:
        self._armed = armed

    def into(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        async def awaited(*arguments: Any, **named: Any) -> Any:
            due = self._due()
            self._raise(due and not self._late)
            result = await plain(*arguments, **named)
            self._raise(due and self._late)
            return result

        def called(*arguments: Any, **named: Any) -> Any:
            due = self._due()
            self._raise(due and not self._late)
            result = plain(*arguments, **named)
            self._raise(due and self._late)
            return result

        patch.setattr(owner, name, awaited if inspect.iscoroutinefunction(plain) else called)

    def _due(self) -> bool:
        with self._guard:
            if not self._armed or self.fired:
                return False
            self._left -= 1
            self.fired += self._left < 0
            return self._left < 0

    def _raise(self, due: bool) -> None:
        if due:
            raise self._error


@pytest.fixture
def store() -> Iterator[Path]:
    """A directory in memory, where syncs cost nothing."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path) / "s"


def live(store: Path, files: Files, arm: Callable[[bool], None]) -> None:
    """Puts that overflow the store while something breaks; then all must be as if nothing had."""
    with Rig(store, files=files, capacity_bytes=CAPACITY) as rig:
        rig.put(branch(7))
        arm(True)
        flights = [rig.begin_put(branch(9, seed)) for seed in range(1, 4)]
        flights.append(rig.begin_put(branch(4, 50), checksums=np.ones(4, np.uint64)))  # not its own
        for flight in flights:
            rig.settle(flight)
        arm(False)
        come_back(rig)
        for seed in range(4, 9):
            assert num_landed(rig.put(branch(9, seed))) == rig.landed(branch(9, seed)) == 9
        for seed in range(1, 4):
            rig.landed(branch(9, seed))  # the rig compares every byte
        assert rig.landed(branch(4, 50)) == 0
        core, used = rig.tier._crew.core, rig.tier.statistics().used_bytes
    assert core.reserved == 0 and not core.anchors and not core.segments._outstanding.total()
    report = check_store(store)
    assert report.ok, report.problems
    assert report.bytes == used <= CAPACITY and disk_takes(store, at_most=used)


def come_back(rig: Rig) -> None:
    """Ask until the store serves, and takes puts, as its users do."""
    for seed in range(10_000, 12_000):
        rig.pass_time()
        if rig.tier.statistics().state == "ok" and num_landed(rig.put(branch(1, seed))) == 1:
            return
        rig.lookup(branch(1))
        rig.signal.wait(rig.signal.ticks, 0.005)
    raise TimeoutError(repr(rig.tier))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", FILE_CALLS)
def test_a_call_on_files_that_raises_anything_costs_its_records_and_no_space(
    store: Path, call: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    fired = 0
    for at in (0, 1, 3):
        files = FaultyFiles(call, error("nobody expects it"), at=at)
        live(store.with_name(f"s{at}"), files, files.arm)
        fired += files.fired
    assert fired > 0
    assert "the writer broke" not in caplog.text, "the store need not be out for this"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), CALLS, ids=lambda part: getattr(part, "__name__", part))
def test_a_writer_that_breaks_anywhere_loses_no_space_and_serves_on(
    store: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, late: bool
) -> None:
    fired = 0
    for at in (0, 3):
        breakage = Breakage(ERRORS[late]("nobody expects it"), at, late=late)
        with monkeypatch.context() as patch:
            breakage.into(patch, owner, name)
            live(store.with_name(f"s{at}"), Files(), breakage.arm)
        fired += breakage.fired
    assert fired > 0
