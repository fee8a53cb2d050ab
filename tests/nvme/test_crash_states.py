"""Power cuts at every instant: every disk they may leave is opened, and nothing is wrong with it.

`crash/disk.py` says what may be left, `crash/judge.py` what must hold. Each workload is judged from
its last operation on: cuts before that are another workload's.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvtier.tiers.nvme.files import Files
from tests.nvme.crash.disk import Model, Sync
from tests.nvme.crash.judge import Judge, Scratch, afterlives, states
from tests.nvme.crash.recorder import HANDLED
from tests.nvme.crash.session import CAPACITY, OPERATIONS, ROOMY, Session, World

Workload = tuple[str, ...]

SHARED_MEMORY = Path("/dev/shm")
FILLED = ("put", "put", "put")
"""Fills the store, so that what follows evicts."""

SYNC_WORKLOADS: Sequence[Workload] = [
    ("put", "pin"),
    (*FILLED, "put", "put"),
    (*FILLED, "overflow"),
    (*FILLED, "shrink"),
    ("put", "remake", "pin", "put"),
]
"""Between them, every sync of the tier is called for a reason."""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    """In memory where there is such a place: it counts pages exactly, and syncs at once."""
    place = str(SHARED_MEMORY if SHARED_MEMORY.is_dir() else tmp_path)
    with TemporaryDirectory(prefix="kvtier-", dir=place) as directory:
        yield Scratch(Path(directory))


def workloads(length: int) -> list[Workload]:
    """All of that many operations."""
    return list(product(OPERATIONS, repeat=length))


def lived(
    workload: Workload,
    scratch: Scratch,
    omitted: str | None = None,
    capacity_bytes: int = CAPACITY,
) -> Session:
    """The session of a workload, over."""
    with scratch.root() as root:
        root.mkdir(parents=True)
        world = World(capacity_bytes=capacity_bytes)
        session = Session(root, Model(), world=world, omitted=omitted)
        with session.running():
            session.run(workload)
    return session


def violations(session: Session, scratch: Scratch, first: int) -> Iterator[str]:
    """What is wrong with the disks that may be left from an event on, one line a disk."""
    judge = Judge(scratch)
    for state in states(session, first):
        for violation in judge.verdict(state, session.world):
            yield f"{'>'.join(s.name for s in session.stages)}: {state.told}: {violation}"


def judged(workload: Workload, scratch: Scratch) -> None:
    session = lived(workload, scratch)
    assert list(violations(session, scratch, session.stages[-1].first)) == []


def judged_afterlives(workload: Workload, scratch: Scratch, stride: int) -> None:
    session = lived(workload, scratch)
    first = session.stages[-1].first
    for turn, life in enumerate(afterlives(session, scratch, first)):
        if turn % stride == 0:
            assert list(violations(life, scratch, 0)) == []


SOME = [*workloads(1), *workloads(2)[::5], *workloads(3)[::229]]


@pytest.mark.parametrize("workload", SOME, ids=" ".join)
def test_every_disk_a_power_cut_may_leave_is_right(workload: Workload, scratch: Scratch) -> None:
    judged(workload, scratch)


@pytest.mark.parametrize("workload", [("overflow",), ("extend", "overflow")], ids=" ".join)
def test_so_is_every_disk_where_groups_share_a_reservation(
    workload: Workload, scratch: Scratch
) -> None:
    session = lived(workload, scratch, capacity_bytes=ROOMY)
    assert list(violations(session, scratch, session.stages[-1].first)) == []


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", [*workloads(1), *workloads(2)], ids=" ".join)
def test_so_is_every_disk_after_all_workloads_of_two_and_of_three_operations(
    first: Workload, scratch: Scratch
) -> None:
    for last in OPERATIONS:
        judged((*first, last), scratch)


@pytest.mark.parametrize("last", OPERATIONS)
def test_power_may_be_cut_again_while_the_next_process_takes_over(
    last: str, scratch: Scratch
) -> None:
    judged_afterlives((*FILLED, last), scratch, 9)


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("last", OPERATIONS)
def test_power_may_be_cut_again_after_a_kill_at_every_instant(last: str, scratch: Scratch) -> None:
    for workload in [(last,), *((one, last) for one in OPERATIONS), (*FILLED, last)]:
        judged_afterlives(workload, scratch, 1)


def test_without_any_one_sync_a_power_cut_does_harm(scratch: Scratch) -> None:
    """Each call of the tier that syncs is left out in turn; one disk must be wrong then."""
    callers: dict[str, list[tuple[Workload, bool]]] = {}
    for workload in SYNC_WORKLOADS:
        session = lived(workload, scratch)
        for site in sites([session]):
            callers.setdefault(site, []).append((workload, False))
        first = session.stages[-1].first
        for site in sites(afterlives(session, scratch, first)):
            callers.setdefault(site, []).append((workload, True))
    assert len(callers) >= 4
    idle = [site for site, where in callers.items() if not harm(site, where, scratch)]
    assert idle == [], "nothing is wrong without these syncs: remove them, or add a workload"


def sites(sessions: Iterable[Session]) -> set[str]:
    """Who calls for a sync."""
    return {
        event.site
        for session in sessions
        for event in session.recorder.events
        if isinstance(event, Sync)
    }


def harm(site: str, where: Sequence[tuple[Workload, bool]], scratch: Scratch) -> bool:
    """Whether a disk may be wrong if the calls from `site` sync nothing."""
    for workload, afterwards in where:
        session = lived(workload, scratch, None if afterwards else site)
        if not afterwards:
            if any(True for _ in violations(session, scratch, 0)):
                return True
            continue
        first = session.stages[-1].first
        for life in afterlives(session, scratch, first, omitted=site):
            if any(True for _ in violations(life, scratch, 0)):
                return True
    return False


def test_the_recorder_knows_every_call_of_the_file_layer() -> None:
    calls = {name for name in vars(Files) if not name.startswith("_")}
    assert calls - {"close", "preadv", "next_data"} <= HANDLED
