"""Delete each fence in turn: does anybody notice?

A *fence* is a line without which bytes could be read too early or overwritten too early: an edge
between copies, a record of who uses a slot, a check that nobody does, a refusal. For each of them
the tree is copied, the line is taken out of the copy, and the seeds of `tests.tiers.seeds` run
there until one fails. A fence that nobody misses is one that the seeds don't judge, or that is not
needed.

    python -m tests.tiers.fences [--seeds N] [--out FILE.json] [NAME ...]

Prints a table, and last one JSON line. Ends with 1 if a deletion was not caught.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.tiers.seeds import WORLDS, draw, problem

ROOT = Path(__file__).parents[2]
ROOMS = ("index", "tiers")
NUM_SEEDS = 500
HANG_S = 300.0


@dataclass(frozen=True)
class Fence:
    """What it keeps, where it stands, and what stands there without it.

    `old` occurs once in the file.
    """

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Verdict:
    fence: str
    caught_by: str | None
    """The world whose seed failed; None: nobody noticed."""
    num_seeds: int
    """Seeds that were run, the one that failed included."""
    how: str


MOVER, LEDGER, GUARD = "tiers/mover.py", "tiers/ledger.py", "tiers/guard.py"
CACHE, LOAD, DEVICE = "tiers/cache.py", "tiers/load.py", "tiers/device.py"
CUDA = "tiers/cuda.py"

FENCES: tuple[Fence, ...] = (
    Fence(
        "a copy waits for the last writer of its source",
        MOVER,
        "*(event for slot in sources for event in above.last_writer(slot)),\n",
        "\n",
    ),
    Fence(
        "a copy waits for the last writer of its destination",
        MOVER,
        "        yield from self.last_writer(slot)\n",
        "",
    ),
    Fence(
        "a copy waits for the readers of its destination",
        MOVER,
        "yield from self.readers.get(slot, {}).values()",
        "yield from ()",
    ),
    Fence("a copy is on record as a reader", MOVER, "above.read(slot, stream, event)", "pass"),
    Fence("a copy is on record as a writer", MOVER, "below.write(slot, event)", "pass"),
    Fence("compute is on record as a writer", MOVER, "uses.write_beside(slot, event)", "pass"),
    Fence("compute is on record as a reader", MOVER, "uses.read(slot, COMPUTE, event)", "pass"),
    Fence(
        "compute that writes on leaves the readers on record",
        MOVER,
        "uses.write_beside(slot, event)",
        "uses.write(slot, event)",
    ),
    Fence(
        "a reader on each stream is on record",
        MOVER,
        "self.readers.setdefault(slot, {})[stream] = event",
        "self.readers[slot] = {stream: event}",
    ),
    Fence(
        "a slot with a writer is not idle",
        MOVER,
        "return slot not in self.writers and slot not in self.readers",
        "return slot not in self.readers",
    ),
    Fence(
        "a slot with readers is not idle",
        MOVER,
        "return slot not in self.writers and slot not in self.readers",
        "return slot not in self.writers",
    ),
    Fence(
        "a writer is forgotten only when it is done",
        MOVER,
        "if slot in self.writers and self.writers[slot].done:",
        "if slot in self.writers:",
    ),
    Fence(
        "a reader is forgotten only when it is done",
        MOVER,
        "for stream in [s for s, event in readers.items() if event.done]:",
        "for stream in list(readers):",
    ),
    Fence(
        "only events that are done need no edge",
        MOVER,
        "{id(e): e for e in events}.values() if not event.done]",
        "{id(e): e for e in events}.values() if event.done]",
    ),
    Fence(
        "no block of a move overwrites another's destination",
        MOVER,
        "if len(set(targets)) < len(targets):",
        "if False:",
    ),
    Fence(
        "no block of a move overwrites another's source",
        MOVER,
        "if src is dst and not set(sources).isdisjoint(targets):",
        "if False:",
    ),
    Fence(
        "compute behind a fence waits for copies",
        MOVER,
        "self.device.wait_for(COMPUTE, events)",
        "pass",
    ),
    Fence(
        "a slot is given back only when it is idle",
        LEDGER,
        "if not self._is_idle(col, slots):",
        "if False:",
    ),
    Fence(
        "the source of a promotion is pinned",
        LEDGER,
        "            self.index.pin(below, ids)\n",
        "",
    ),
    Fence(
        "the source of a demotion is pinned",
        LEDGER,
        "            self.index.pin(col, started)\n",
        "",
    ),
    Fence(
        "the source of a put is pinned",
        LEDGER,
        "        self.index.pin(col, ids)\n        (self._writing_back",
        "        (self._writing_back",
    ),
    Fence(
        "a slot that a copy fills is FILLING",
        LEDGER,
        "self.book.mark(slots, SlotUse.FILLING)",
        "self.book.mark(slots, SlotUse.RESIDENT)",
    ),
    Fence(
        "a copied tail is COPYING",
        LEDGER,
        "self.book.mark(dst, SlotUse.COPYING, owner)",
        "self.book.mark(dst, SlotUse.PRIVATE, owner)",
    ),
    Fence(
        "a copied tail is whole only when all of it has landed",
        LEDGER,
        "        if not tail.flight.done:\n            return\n",
        "",
    ),
    Fence(
        "a copied tail that failed is nobody's",
        LEDGER,
        "if not tail.failed:",
        "if True:",
    ),
    Fence(
        "a slot that was given back is FREE",
        LEDGER,
        "self.book.mark(slots, SlotUse.FREE)",
        "pass",
    ),
    Fence("the guard refuses", GUARD, "if len(bad):", "if False:"),
    Fence(
        "the guard knows whose slot it is",
        GUARD,
        "(use == SlotUse.PRIVATE) & (self._owner[inside] == owner)",
        "use == SlotUse.PRIVATE",
    ),
    Fence(
        "the guard knows a slot that changed hands",
        GUARD,
        "        fine &= self._generation[inside] == table.generations\n",
        "",
    ),
    Fence(
        "the guard knows where the pool ends",
        GUARD,
        "return np.flatnonzero(outside | ~fine)",
        "return np.flatnonzero(~fine)",
    ),
    Fence(
        "a launch is on record as a writer",
        GUARD,
        "self._mover.computed(self._pool, slots[private])",
        "pass",
    ),
    Fence(
        "the last launch of a lease is on record as a reader",
        GUARD,
        "self._reading(passed.table, self._latest)",
        "pass",
    ),
    Fence(
        "a launch of what may leave before its lease ends is on record as a reader",
        GUARD,
        "self._reading(table, launch)",
        "pass",
    ),
    Fence(
        "a reader's event is not replaced by an earlier one",
        GUARD,
        "(passed.table, self._latest)",
        "(passed.table, passed.launch)",
    ),
    Fence("the guard hears that a lease has ended", CACHE, "self.guard.ended(lease)", "pass"),
    Fence(
        "nothing is committed while it loads",
        CACHE,
        '_require_whole(lease, "commit")',
        "pass",
    ),
    Fence("nothing is forked while it loads", CACHE, '_require_whole(lease, "fork")', "pass"),
    Fence(
        "a block that a copy fills is not adopted",
        CACHE,
        "filling = self._index.state(0, new) == Residency.FILLING",
        "filling = np.zeros(len(new), np.bool_)",
    ),
    Fence(
        "what has arrived is RESIDENT",
        LOAD,
        "here = self._ledger.holds(self._col, rest)",
        "here = ~self._ledger.lacks(self._col, rest)",
    ),
    Fence(
        "a worker waits for what its copies come after",
        DEVICE,
        "        _await(after)\n        began",
        "        began",
    ),
    Fence(
        "compute on the CPU waits for copies",
        DEVICE,
        "        if stream == COMPUTE:\n            _await(events)",
        "        if stream == COMPUTE:\n            pass",
    ),
    Fence(
        "a CUDA stream waits for what its copies come after",
        CUDA,
        "            self._fence(queue, after)\n",
        "",
    ),
    Fence(
        "CUDA's compute waits for copies",
        CUDA,
        "self._fence(self._queue(stream), events)",
        "pass",
    ),
    Fence("a CUDA stream waits for each event", CUDA, "queue.wait_event(event.mark)", "pass"),
    Fence(
        "a move on CUDA is over when its copies are",
        CUDA,
        "end = CudaEvent(last)",
        "end = CudaEvent(began)",
    ),
    Fence(
        "a move that CUDA broke off is over when what was queued is",
        CUDA,
        "                last = self._mark(queue)  # behind",
        "                pass  # behind",
    ),
    Fence(
        "a move that CUDA did not begin stands behind what it would have waited for",
        CUDA,
        "                return CudaEvent(began)",
        "                return CudaEvent(self._runtime.mark())",
    ),
    Fence(
        "a block lands on CUDA when its copy is over",
        CUDA,
        "            landing.ended.synchronize()\n            busy_s = "
        "landing.began.elapsed_time(landing.ended) / 1000\n",
        "            busy_s = 0.0\n",
    ),
    Fence(
        "host memory is unlocked when its copies are over",
        CUDA,
        "            for stream in self._streams.values():\n"
        "                stream.synchronize()\n            registration",
        "            registration",
    ),
    Fence(
        "a CUDA device is closed when its copies are over",
        CUDA,
        "            lander.shutdown()\n        for stream in self._streams.values():\n"
        "            stream.synchronize()\n",
        "            pass\n",
    ),
    Fence(
        "a copy ends at the border of registered memory",
        CUDA,
        "borders.update(range(run.start + -slot % chunks[pool], run.stop, chunks[pool]))",
        "pass",
    ),
    Fence(
        "a copy ends where slots have padding behind them",
        CUDA,
        "chunks[pool] = registration.chunk_slots if is_dense else 1",
        "chunks[pool] = registration.chunk_slots",
    ),
)


def delete(fence: Fence, folder: Path) -> None:
    """Copy the tree to `folder`, without the fence. Raises `ValueError` if it is not there."""
    package = folder / "src" / "kvtier"
    shutil.copytree(ROOT / "src" / "kvtier", package, symlinks=True)
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("__init__.py", "prf.py"):
        (folder / "tests").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / part, folder / "tests" / part)
    shutil.copytree(ROOT / "tests" / "tiers", folder / "tests" / "tiers")
    file = folder / fence.file
    text = file.read_text()
    if text.count(fence.old) != 1:
        raise ValueError(f"{fence.name}: {fence.old!r} stands {text.count(fence.old)} times")
    file.write_text(text.replace(fence.old, fence.new))


def judge(fence: Fence, num_seeds: int) -> Verdict:
    """Run the seeds without the fence, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        delete(fence, Path(folder))
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "tests.tiers.fences", "--judge", "--seeds", str(num_seeds)]
        try:
            child = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=HANG_S
            )
        except subprocess.TimeoutExpired:
            return Verdict(fence.name, "a seed", 0, "it never ends")
    if child.returncode:
        raise RuntimeError(f"{fence.name}: the judge failed:\n{child.stderr}")
    world, ran, how = json.loads(child.stdout)
    return Verdict(fence.name, world, ran, how)


def first_failure(num_seeds: int) -> tuple[str | None, int, str]:
    """`(world, seeds run, what it says)` of the first seed that fails, over all worlds."""
    for seed in range(num_seeds):
        for world in WORLDS:
            error = problem(draw(world, seed))
            if error is not None:
                text = str(error).splitlines()
                return world, seed + 1, f"{type(error).__name__}: {text[0] if text else ''}"
    return None, num_seeds, "nobody notices"


HEAD = "| fence | caught by | seeds | how |\n| --- | --- | ---: | --- |"


def row(each: Verdict) -> str:
    """A verdict for a reader."""
    return f"| {each.fence} | {each.caught_by or '**nobody**'} | {each.num_seeds} | {each.how} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="fences whose name holds one of these words")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="most seeds for each fence")
    parser.add_argument("--out", type=Path, help="write the verdicts there, as JSON")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        print(json.dumps(first_failure(options.seeds)))
        return 0
    wanted = [f for f in FENCES if not options.names or any(n in f.name for n in options.names)]
    print(HEAD)
    verdicts: list[Verdict] = []
    for fence in wanted:
        verdicts.append(judge(fence, options.seeds))
        print(row(verdicts[-1]), flush=True)
    found = [asdict(verdict) for verdict in verdicts]
    missed = [verdict.fence for verdict in verdicts if verdict.caught_by is None]
    result = {"fences": len(verdicts), "missed": missed, "seeds": options.seeds}
    if options.out is not None:
        options.out.write_text(json.dumps({**result, "verdicts": found}, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
