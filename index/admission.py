"""Which blocks are worth writing to a store when they leave the last pool: learned, class by class.

A class is what is known of a block when it leaves: how it came (below nothing known, as a further
branch, or as the growth of a path) and how often it was asked for since. Learned is how many of its
blocks are asked for again, and how much later, whether they were written or not. From that follows
what a set of classes earns. A store of `store_blocks` that takes a smaller share of what leaves
keeps each block for longer, so that what never returns costs others their hits even where writing
is free. Written are the classes with the most

    hits - price * writes        hits: blocks asked for again while the store would still have them

which for every class comes to `p * (t_recompute - t_load) > price * t_write`, times being the same
for all blocks. `price` is raised until the writes fit into what may be written: classes are taken
in order of yield, the last one in part. Pure: block marks and times in, decisions out; no clock,
no store, no residency.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.index.words import KEY_BYTES, BlockKey

Marks = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

ADMISSIONS = ("all", "learned")
"""Everything that leaves is written; or what this module finds worth it."""

PRICE = 0.1
"""Hits that a write must bring although writing is free: it takes the drive's time and life."""

UNSEEN = 0.05
"""Share of blocks taken to return in each doubling of age that has not been watched yet."""

_WATCHED = 300
"""After how many watched blocks what they did counts as much as `UNSEEN`; an eighth of the store if
that is less, for more are never remembered there."""

_KINDS = ("new", "branch", "growth")
_NEW, _BRANCH, _GROWTH = range(3)
_TOUCHES = ("0", "1", "2+")
CLASSES = tuple(f"{kind}, asked again {n}" for kind in _KINDS for n in _TOUCHES)

_STEPS = 64
"""Decisions are made anew so often while as many blocks leave as the store holds."""

_LIVES = 4
"""A block is watched for while so many times that number leave; past counts halve as fast."""

_MOST_SLOTS = 1 << 21
_RATE_STEPS = 256


def marks_of(keys: Sequence[BlockKey]) -> Marks:
    """The first eight bytes of each key: uint64 `[len(keys)]`."""
    whole = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    return np.ascontiguousarray(whole[:, :8]).view("<u8").reshape(-1)


@dataclass(frozen=True)
class Allowance:
    """What may still be written: `nbytes` within `seconds`."""

    nbytes: float
    seconds: float


@dataclass(frozen=True)
class ClassStatistics:
    """One class: blocks that left lately (older ones count less), the share of them expected to be
    asked for while a store would keep them, and the share of such blocks that is written."""

    left: float
    returns: float
    written: float


@dataclass(frozen=True)
class AdmissionStatistics:
    """`price`: hits that a written block has to bring now."""

    price: float
    classes: Mapping[str, ClassStatistics]


class Admission:
    """The learner. Tell it of every request (`asked`) and of every block that leaves (`left`), and
    have it decide anew (`review`) whenever that `is_due`.

    What it remembers of blocks is a table of fixed size, one slot for all marks that fall on it: a
    block whose slot another took is forgotten, which loses an observation and nothing else. 21
    bytes a slot, eight slots for each block of pool and store, two million at most.
    """

    def __init__(self, pool_blocks: int, store_blocks: int, *, price: float = PRICE) -> None:
        """Sizes in blocks, at least one each."""
        self._store_blocks = store_blocks
        self._least_price = price
        self._prior = min(_WATCHED, max(1, store_blocks // 8))
        wanted = min(_MOST_SLOTS, 8 * (pool_blocks + store_blocks))
        size = 1 << max(10, (wanted - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._marks = np.zeros(size, np.uint64)
        self._kind = np.zeros(size, np.uint8)
        self._touches = np.zeros(size, np.uint8)
        self._branched = np.zeros(size, np.bool_)  # something hangs below it
        self._lot = np.zeros(size, np.uint8)
        self._left_at = np.zeros(size, np.int64)  # 0: has not left, or has been asked for since
        self._left_as = np.zeros(size, np.uint8)

        n = len(CLASSES)
        self._step = max(16, store_blocks // _STEPS)
        self._fade = 0.5 ** (self._step / (_LIVES * max(store_blocks, self._step)))
        most_age = _LIVES * max(store_blocks, self._step)
        self._ages = 2 ** np.arange(1, most_age.bit_length() + 1)  # the ends of the doublings
        self._lags = np.maximum(1, self._ages // self._step)  # the same in steps
        self._steps = np.zeros((int(self._lags[-1]) + 1, n))  # leavings of each of the last steps
        self._times: list[float] = []  # when the last steps began
        self._clock = 0  # blocks that have left
        self._num_steps = 0
        self._leaving = np.zeros(n)
        self._lacking = np.zeros(n)  # of them and of those that stay: what the store had not
        self._left = np.zeros(n)
        self._dirty = np.zeros(n)
        self._back = np.zeros((n, len(self._ages)))
        self._reached = np.zeros((n, len(self._ages)))
        self._written = np.ones(n)
        self._price = price
        self._kept = float(most_age)

    # ---- observing -------------------------------------------------------------------------------

    def asked(self, marks: Marks) -> None:
        """A request asks for this whole path, root first, whoever holds it."""
        if not len(marks):
            return
        slots = self._slots(marks)
        known = self._marks[slots] == marks
        seen = slots[known]
        returned = seen[self._left_at[seen] > 0]
        if len(returned):
            ages = self._clock - self._left_at[returned] + 1
            doubling = np.minimum(np.searchsorted(self._ages, ages), len(self._ages) - 1)
            np.add.at(self._back, (self._left_as[returned], doubling), 1)
            self._left_at[returned] = 0
        self._touches[seen] = np.minimum(self._touches[seen], 254) + 1
        if not known.all():
            self._come(marks, slots, ~known)

    def _come(self, marks: Marks, slots: npt.NDArray[np.intp], fresh: Mask) -> None:
        first = int(np.argmax(fresh))
        above = slots[first - 1] if first else None
        kind = _NEW if above is None else _BRANCH if self._branched[above] else _GROWTH
        if above is not None:
            self._branched[above] = True
        self._enter(marks[fresh], slots[fresh], kind)

    def _enter(self, marks: Marks, slots: npt.NDArray[np.intp], kind: int) -> None:
        """These blocks, the rest of one path, are new to the table."""
        self._marks[slots] = marks
        self._kind[slots] = kind
        self._touches[slots] = 0
        self._branched[slots] = True
        self._branched[slots[-1]] = False
        self._lot[slots] = int(marks[0] >> np.uint64(56))
        self._left_at[slots] = 0

    def written(self, marks: Marks) -> None:
        """These blocks are being written, because they are worth it."""
        np.add.at(self._lacking, self._classes(self._entered(marks)), 1)

    def left(self, marks: Marks, lacking: Mask) -> None:
        """These blocks left the last pool; `lacking` are those that were not written."""
        slots = self._entered(marks)
        classes = self._classes(slots)
        np.add.at(self._leaving, classes, 1)
        np.add.at(self._lacking, classes[lacking], 1)
        self._left_at[slots] = self._clock + 1
        self._left_as[slots] = classes
        self._clock += len(marks)

    def _entered(self, marks: Marks) -> npt.NDArray[np.intp]:
        slots = self._slots(marks)
        unknown = self._marks[slots] != marks
        if unknown.any():  # computed by a request that had not asked for them: its answer
            self._enter(marks[unknown], slots[unknown], _GROWTH)
        return slots

    # ---- deciding --------------------------------------------------------------------------------

    def worth(self, marks: Marks) -> Mask:
        """Which of these blocks should be written, apart from what hangs off them."""
        slots = self._slots(marks)
        known = self._marks[slots] == marks
        classes = np.where(known, self._classes(slots), _GROWTH * len(_TOUCHES))
        # Of a class that is taken in part, whole documents are: what came together goes together.
        lots = np.where(known, self._lot[slots], np.uint8(0))
        return np.asarray(lots < 256 * self._written[classes], np.bool_)

    def is_due(self) -> bool:
        """Whether enough blocks have left for `review`."""
        return float(self._leaving.sum()) >= self._step

    def review(self, now: float, allowed_blocks: float, seconds: float) -> None:
        """Decide anew. At most `allowed_blocks` (perhaps infinite) may be written in `seconds`."""
        n = float(self._leaving.sum())
        steps = len(self._steps)
        self._steps[self._num_steps % steps] = self._leaving
        self._left = self._left * self._fade + self._leaving
        self._dirty = self._dirty * self._fade + self._lacking
        self._back *= self._fade
        self._reached *= self._fade
        for doubling, lag in enumerate(self._lags.tolist()):
            if lag <= self._num_steps:
                self._reached[:, doubling] += self._steps[(self._num_steps - lag) % steps]
        self._leaving[:] = 0
        self._lacking[:] = 0
        self._num_steps += 1
        self._times = [*self._times[1 - _RATE_STEPS :], now]
        elapsed = now - self._times[0]
        rate = n * (len(self._times) - 1) / elapsed if elapsed > 0 else 0.0
        most = np.inf
        if rate > 0 and np.isfinite(allowed_blocks):
            most = allowed_blocks / max(seconds, 1.0) / rate
        self._choose(most)

    def _choose(self, most: float) -> None:
        """Take classes in order of yield while they gain, and while writes stay below `most` a
        block that leaves."""
        total = max(float(self._left.sum()), 1.0)
        left, dirty = self._left / total, self._dirty / total
        order = np.argsort(-self._returns(self._kept), kind="stable")
        best, num_taken = 0.0, 0
        kept = float(self._ages[-1])
        for n in range(1, len(order) + 1):
            taken = order[:n]
            writes = float(dirty[taken].sum())
            age = min(float(self._ages[-1]), self._store_blocks / max(writes, 1e-9))
            gain = float((left * self._returns(age))[taken].sum()) - self._least_price * writes
            if gain >= best:
                best, num_taken, kept = gain, n, age
        self._written[:] = 0
        self._price, self._kept = self._least_price, kept
        returns = self._returns(kept)
        for c in order[:num_taken].tolist():
            share = min(1.0, most / max(float(dirty[c]), 1e-9)) if most > 0 else 0.0
            self._written[c] = share
            most -= float(dirty[c]) * share
            if share < 1:
                self._price = max(self._price, float(returns[c]))
                break

    def _returns(self, age: float) -> npt.NDArray[np.float64]:
        """Per class, the share of blocks asked for again while at most `age` others leave."""
        # At risk in a doubling are those that reached its start; of some it is not over yet.
        begun = np.concatenate([self._left[:, None], self._reached[:, :-1]], axis=1)
        watched = (begun + self._reached) / 2 + self._prior
        per_doubling = (self._back + UNSEEN * self._prior) / watched
        ends = self._ages.astype(np.float64)
        starts = np.concatenate([[0.0], ends[:-1]])
        covered = np.clip((age - starts) / (ends - starts), 0.0, 1.0)
        returns: npt.NDArray[np.float64] = (per_doubling * covered).sum(axis=1)
        return np.minimum(1.0, returns)

    def statistics(self) -> AdmissionStatistics:
        """What has been learned so far."""
        returns = self._returns(self._kept)
        return AdmissionStatistics(
            self._price,
            {
                name: ClassStatistics(
                    float(self._left[c]), float(returns[c]), float(self._written[c])
                )
                for c, name in enumerate(CLASSES)
            },
        )

    # ---- the table -------------------------------------------------------------------------------

    def _slots(self, marks: Marks) -> npt.NDArray[np.intp]:
        return (marks & self._mask).astype(np.intp)

    def _classes(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        touches = np.minimum(self._touches[slots], len(_TOUCHES) - 1)
        return np.asarray(self._kind[slots].astype(np.intp) * len(_TOUCHES) + touches, np.intp)
