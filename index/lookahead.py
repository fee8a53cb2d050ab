"""What waiting requests will ask for soon, as blocks that an eviction passes over while it can.

Keeps the tokens of the requests at the head of the queue, and finds their blocks when a plan is
made. Holds no pin and no count: nothing has to be undone when a request leaves the queue, and
whoever needs the room gets it. The idea is look-ahead LRU (PCR, arXiv 2603.23049).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.index.blocks import RESIDENT, BlockTable
from kvtier.index.tree import Tree
from kvtier.index.words import BlockIds, Tokens


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request still in the queue: the tokens it will ask for."""

    namespace: bytes
    tokens: Tokens


class Lookahead:
    """`most[col]`: how many blocks of a column may be protected at once."""

    def __init__(self, tree: Tree, table: BlockTable, most: Sequence[int]) -> None:
        self._tree = tree
        self._table = table
        self._most = tuple(most)
        self._waiting: tuple[Waiting, ...] = ()
        self._paths: list[BlockIds] = []
        self._flags: dict[int, npt.NDArray[np.bool_]] = {}

    def expect(self, waiting: Sequence[Waiting]) -> None:
        """These requests wait now, the next one first, and no others."""
        self._waiting = tuple(waiting)
        self._paths = []
        self._flags = {}

    def protected(self, col: int) -> npt.NDArray[np.bool_] | None:
        """A flag per block id, or None where there is nothing to protect.

        RESIDENT, unpinned blocks of the waiting requests' paths, each path from the root, the next
        request's first. Looked up once after each `expect`, by the first plan that is made: what
        comes later is not protected, and an id that has got another block since is, for a while.
        """
        if not self._waiting or not self._most[col]:
            return None
        flags = self._flags.get(col)
        if flags is None or len(flags) < len(self._table.node):
            flags = self._flags[col] = self._choose(col)
        return flags

    def _choose(self, col: int) -> npt.NDArray[np.bool_]:
        left = self._most[col]
        state, pins = self._table.state[col], self._table.pins[col]
        flags = np.zeros(len(state), np.bool_)
        for number, waiting in enumerate(self._waiting):
            if number == len(self._paths):
                self._paths.append(self._tree.match(waiting.namespace, waiting.tokens))
            ids = self._paths[number]
            counted = (state[ids] == RESIDENT) & (pins[ids] == 0) & ~flags[ids]
            chosen = ids[counted][:left]
            flags[chosen] = True
            left -= len(chosen)
            if not left:
                break
        return flags
