"""Opens every disk a power cut may leave of a session, and says what is wrong with it.

A verdict is an empty list, or what was violated: wrong bytes, a published block that is not served,
usage that is not exact, a catalogue at odds with itself, a store that takes no further put.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from shutil import rmtree

from kvtier.index.errors import KvtierError
from kvtier.tiers.nvme.check import check_store
from kvtier.tiers.nvme.files import Files
from tests.nvme.crash.disk import Image
from tests.nvme.crash.session import GONE, PINNED, Session, World, rest
from tests.nvme.rig import NAMESPACE, Rig, branch, num_landed, segment_files


@dataclass(frozen=True)
class State:
    """A disk, what must be served from it, and how it came to be."""

    image: Image
    promise: frozenset[bytes]
    told: str


class Scratch:
    """Directories that are there for a while, below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._turns = count()

    @contextmanager
    def root(self) -> Iterator[Path]:
        """A path where nothing is yet; what is made there goes in the end."""
        root = self._directory / str(next(self._turns))
        try:
            yield root
        finally:
            rmtree(root, ignore_errors=True)


def states(session: Session, first: int = 0) -> Iterator[State]:
    """Every different disk from an event on, with all that was ever promised of it."""
    found: dict[Image, tuple[frozenset[bytes], str]] = {}
    promises = list(session.promises())
    events = session.recorder.events
    for done, model in session.recorder.instants(first):
        after = type(events[done - 1]).__name__.lower() if done else "nothing"
        for fate, disk in model.cuts():
            image = disk.image()
            promise, told = found.get(image, (frozenset(), f"event {done} ({after}), {fate}"))
            found[image] = (promise | promises[done], told)
    for image, (promise, told) in found.items():
        yield State(image, promise, told)


def afterlives(
    session: Session, scratch: Scratch, first: int = 0, *, omitted: str | None = None
) -> Iterator[Session]:
    """The session's store, killed after each event from the `first` on and opened again.

    What was pending still is: power may be cut while the next process takes over.
    """
    seen = set[tuple[Image, int]]()
    promises = list(session.promises())
    for done, model in session.recorder.instants(first):
        image = model.whole().image()
        if (image, len(model.pending)) in seen:
            continue
        seen.add((image, len(model.pending)))
        with scratch.root() as root:
            image.write(root)
            life = Session(
                root,
                model,
                promise=promises[done],
                omitted=omitted,
                world=session.world,
            )
            with life.running():
                pass
        yield life


class Judge:
    """Opens states. `num_judged` counts them."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.num_judged = 0

    def verdict(self, state: State, world: World) -> list[str]:
        """What is wrong with a store of that world that begins as `state`, some time later."""
        later = replace(world, now_s=world.now_s + 10.0)
        self.num_judged += 1
        with self._scratch.root() as root:
            state.image.write(root)
            try:
                return list(_examine(root / "store", state, later))
            except (AssertionError, KvtierError) as error:
                return [f"{type(error).__name__}: {error}"]


def _examine(store: Path, state: State, world: World) -> Iterator[str]:
    with world.open(store, Files(direct=False)) as rig:
        rest(rig)
        yield from _usage(rig, "after opening")
        served = set[bytes]()
        for path in world.paths:
            promised = rig.tier.holds(NAMESPACE, path.keys)
            landed = num_landed(rig.fetch(path))
            served.update(path.keys[:landed])
            if landed > promised:
                yield "a fetch brought more than a lookup promised"
        for fact in state.promise - world.facts(rig, served):
            told = fact.removeprefix(PINNED).removeprefix(GONE)
            what = fact[: -len(told)].decode() or "published "
            yield f"block {told.hex()[:16]} was {what}and is no longer"
        rest(rig)
        yield from _usage(rig, "after fetches")
        more = branch(1, 1 << 10)
        if num_landed(rig.put(more)) != 1 or num_landed(rig.fetch(more)) != 1:
            yield "a further put failed"
        rest(rig)
        yield from _usage(rig, "after a put")
        used = rig.tier.statistics().used_bytes
    report = check_store(store)
    yield from report.problems
    if report.bytes != used or report.leftover_bytes:
        yield f"check found {report.bytes} bytes, {report.leftover_bytes} left over; not {used}"


def _usage(rig: Rig, when: str) -> Iterator[str]:
    """Exact: what the tier counts is what the disk has given."""
    taken = sum(path.stat().st_blocks * 512 for path in segment_files(rig.path))
    used = rig.tier.statistics().used_bytes
    if taken != used:
        yield f"{when}: {used} bytes are counted, {taken} are taken"
