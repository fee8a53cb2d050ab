"""Block tables: the slots that a lease gives to a kernel, root first, and what they were then.

A slot is recycled: it is given up, and later it holds another block. Its generation counts how
often. A table carries the generation of every slot it names, so that one made before a slot was
recycled is known as stale, even when the slot is whole again. A lease writes its blocks down on a
line that only grows; tables are looks at its beginning, so that what was checked of one table need
not be checked of the next. Knows no residency and no pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.index.words import Slots

Generations = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class BlockTable:
    """Slots of the top pool, int32 `[n]`, and the generation of each, int64 `[n]`.

    Nobody writes into either. Tables of one `line` agree in all blocks that both have. A table of
    no line may name anything: nothing is remembered of it.
    """

    slots: Slots
    generations: Generations
    line: "Line | None" = None

    def __len__(self) -> int:
        return len(self.slots)

    def first(self, n: int) -> "BlockTable":
        """The table of the first `n` blocks."""
        if n >= len(self.slots):
            return self
        return BlockTable(self.slots[:n], self.generations[:n], self.line)

    def after(self, n: int) -> "BlockTable":
        """The rest, behind the first `n` blocks, as a table of its own."""
        if not n:
            return self
        return BlockTable(self.slots[n:], self.generations[n:])

    @staticmethod
    def joined(tables: "Sequence[BlockTable]") -> "BlockTable":
        """One table of all their blocks, one after another."""
        if len(tables) == 1:
            return tables[0]
        slots = np.concatenate([table.slots for table in tables])
        return BlockTable(slots, np.concatenate([table.generations for table in tables]))


class Line:
    """What one lease's blocks are, from the root on; blocks are appended, and none is changed.

    The lease pins them, or they are private to it, until it ends (or a commit exchanges those).
    """

    def __init__(self) -> None:
        self._slots: Slots = np.empty(16, np.int32)
        self._generations: Generations = np.empty(16, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, slots: Slots, generations: Generations) -> None:
        """Amortised O(new). Tables made before stay as they are."""
        end = self._count + len(slots)
        if end > len(self._slots):
            room = max(end, 2 * len(self._slots))
            self._slots = np.concatenate(
                [self._slots[: self._count], np.empty(room - self._count, np.int32)]
            )
            self._generations = np.concatenate(
                [self._generations[: self._count], np.empty(room - self._count, np.int64)]
            )
        self._slots[self._count : end] = slots
        self._generations[self._count : end] = generations
        self._count = end

    def begun_like(self, n: int) -> "Line":
        """A new line that has the first `n` blocks of this one."""
        line = Line()
        line.append(self._slots[:n], self._generations[:n])
        return line

    def table(self) -> BlockTable:
        """All blocks so far."""
        return BlockTable(self._slots[: self._count], self._generations[: self._count], self)
