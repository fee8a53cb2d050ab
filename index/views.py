"""What a plan sees of one column: which blocks may go from a node's tail, and what hangs below.

`PoolView` is for memory that must make room; `HintView` for blocks the index knows by stores'
hints alone. Both read the table and the nodes, and change nothing.
"""

import numpy as np
import numpy.typing as npt

from kvtier.index.blocks import RESIDENT, BlockTable
from kvtier.index.tree import FIRST_WINDOW, NO_BLOCKS, Node
from kvtier.index.words import BlockIds


def _take_tail(
    ids: BlockIds, n: int, may_go: npt.NDArray[np.bool_], must_stay: npt.NDArray[np.bool_]
) -> tuple[BlockIds, bool]:
    """From flags of `ids` (deepest first): what to take, and whether something must stay."""
    stopped = bool(must_stay.any())
    if stopped:
        end = int(must_stay.argmax())
        ids, may_go = ids[:end], may_go[:end]
    return ids[may_go][:n], stopped


class PoolView:
    """Blocks of a pool: RESIDENT and unpinned may go; ABSENT ones are holes.

    `protected`, a flag per block id, names blocks that may go only when the plan relents.
    """

    def __init__(
        self, table: BlockTable, col: int, protected: npt.NDArray[np.bool_] | None
    ) -> None:
        self._col = col
        self._state = table.state[col]
        self._pins = table.pins[col]
        self._protected = protected

    def parent(self, node: Node) -> Node | None:
        return node.parent

    def twigs(self, node: Node) -> int:
        return node.twigs[self._col]

    def holds(self, node: Node) -> bool:
        return node.held[self._col] > 0

    def relent(self) -> bool:
        protected, self._protected = self._protected, None
        return protected is not None

    def _keeps(self, block: np.int32) -> bool:
        return self._protected is not None and bool(self._protected[block])

    def tail(self, node: Node, n: int, keep: int = 0) -> tuple[BlockIds, bool]:
        ids = node.ids
        last = ids[-1]
        if self._state[last] and (self._pins[last] or self._keeps(last)):
            return NO_BLOCKS, False  # the usual reasons to pass a node over, found cheaply
        end, window, wanted = len(ids), max(n, FIRST_WINDOW), n
        parts: list[BlockIds] = []
        while end > keep and wanted > 0:
            begin = max(keep, end - window)
            run = ids[begin:end][::-1]
            state = self._state[run]
            resident = state == RESIDENT
            free = self._pins[run] == 0
            if self._protected is not None:
                free &= ~self._protected[run]
            may_go = resident & free
            taken, stopped = _take_tail(run, wanted, may_go, (state != 0) & ~may_go)
            parts.append(taken)
            wanted -= len(taken)
            if stopped:
                break
            end, window = begin, 2 * window
        found = np.concatenate(parts) if parts else NO_BLOCKS
        return found, len(found) == node.held[self._col]


class HintView:
    """Blocks that live by hints alone. Any child keeps its parent, held or not."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table

    def parent(self, node: Node) -> Node | None:
        return node.parent

    def twigs(self, node: Node) -> int:
        return len(node.children)

    def holds(self, node: Node) -> bool:
        return True  # what lies above is looked at when its own turn comes

    def relent(self) -> bool:
        return False

    def tail(self, node: Node, n: int, keep: int = 0) -> tuple[BlockIds, bool]:
        run = node.ids[keep:][::-1]
        taken, stopped = _take_tail(run, n, self._table.hints[run] > 0, self._table.busy[run] > 0)
        return taken, not stopped and len(taken) == int(np.count_nonzero(self._table.hints[run]))
