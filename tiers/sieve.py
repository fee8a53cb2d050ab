"""Which blocks of the last pool go down to the store, where not all of them do.

Between the ledger, which evicts and writes, and `Admission`, which learns what is worth writing:
names blocks by the heads of their keys, keeps a branch whole from its root to the last block that
is worth it (a store takes a block only after its parent), and turns the store's allowance of bytes
into blocks. Called with the cache's lock held. Changes no residency.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.index.admission import Admission, AdmissionStatistics, Allowance, marks_of
from kvtier.index.radix import RadixIndex
from kvtier.index.words import BlockIds, BlockKey
from kvtier.tiers.moves import Mask


def unlimited() -> Allowance | None:
    """The allowance of who gives no limit."""
    return None


@dataclass(frozen=True)
class SieveStatistics:
    """Blocks that were sent to the store, and blocks that left the last pool without being sent."""

    admitted: int
    refused: int
    learned: AdmissionStatistics


class Sieve:
    """`allowance` says what may still be written; None: as much as one likes."""

    def __init__(
        self,
        index: RadixIndex,
        admission: Admission,
        allowance: Callable[[], Allowance | None],
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._admission = admission
        self._allowance = allowance
        self._block_bytes = block_bytes
        self._clock = clock
        self._admitted = 0
        self._refused = 0

    def asked(self, ids: BlockIds, behind: Sequence[BlockKey]) -> None:
        """A request asks for a path: blocks the index knows, then those of these keys."""
        self._index.keys(ids[-1:])  # gives the whole path its keys
        self._admission.asked(np.concatenate([self._index.marks(ids), marks_of(behind)]))

    def num_wanted(self, run: BlockIds) -> int:
        """How many leading blocks of a root-first run of one branch should be written.

        No more than are allowed, whatever was decided when more was: at first everything is.
        """
        self._index.keys(run[-1:])
        worth = self._admission.worth(self._index.marks(run))
        wanted = len(run) - int(np.argmax(worth[::-1])) if worth.any() else 0
        allowed = self._allowance() if wanted else None
        return wanted if allowed is None else min(wanted, int(allowed.nbytes // self._block_bytes))

    def unwanted(self, runs: Sequence[BlockIds]) -> BlockIds:
        """Of root-first runs of branches, the blocks that should not be written."""
        parts = [run[self.num_wanted(run) :] for run in runs]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def sent(self, ids: BlockIds) -> None:
        """These blocks, a run of one branch, are on their way to the store."""
        self._admitted += len(ids)
        self._admission.written(self._index.marks(ids))

    def leaving(self, ids: BlockIds, lacking: Mask) -> None:
        """These blocks leave the last pool now; `lacking` are those that are not in the store."""
        self._refused += int(np.count_nonzero(lacking))
        marks = self._index.marks(ids)
        keyed = marks != 0
        self._admission.left(marks[keyed], lacking[keyed])
        if self._admission.is_due():
            allowed = self._allowance()
            if allowed is None:
                self._admission.review(self._clock(), np.inf, np.inf)
            else:
                blocks = allowed.nbytes / self._block_bytes
                self._admission.review(self._clock(), blocks, allowed.seconds)

    def statistics(self) -> SieveStatistics:
        """What became of blocks so far, and what has been learned."""
        return SieveStatistics(self._admitted, self._refused, self._admission.statistics())
