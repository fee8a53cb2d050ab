"""Per-block state in arrays: what is known about block `id`, whatever node holds it now.

A block keeps its id while the tree around it is split and trimmed, so leases, copies in flight and
pins name blocks, never nodes. Knows nothing of tokens, branches or eviction order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.index.words import KEY_BYTES, BlockIds, BlockKey, Residency

FIRST_CAPACITY = 1024
# Looked up once: on an enum class every look-up costs a microsecond.
ABSENT, RESIDENT = Residency.ABSENT, Residency.RESIDENT

PER_COLUMN = ("state", "slot", "pins")
PER_BLOCK = ("node", "parent", "depth", "busy", "hints", "keys", "keyed", "found")


class IndexCorrupt(AssertionError):
    """The index was driven, or stands, as its rules forbid: a bug of ours, never the user's."""


class BlockTable:
    """Structured arrays over block ids `0 .. size`, grown by doubling; freed ids are recycled.

    Per (column, id): `state` uint8 (`Residency`), `slot` int32 (meaningless when ABSENT), `pins`
    int32. Per id: `node` int32 (0: the id is free), `parent` id int32 (-1: first of its branch),
    `depth` int32 (blocks above it), `busy` int32 (pools that hold it, in any state, plus its pins),
    `hints` uint8 (stores that may hold it), `found` bool (somebody asked for what another had
    made), `keys` uint8[32] valid where `keyed`.

    Beside them the counts that follow from them: `totals[column][state]` (ABSENT is not counted),
    `pinned[column]`, `evictable[column]` (RESIDENT and unpinned), and `hint_only`, the blocks with
    a hint that are not busy.

    All arrays start as zeros: what no block has used yet costs address space, not memory.
    """

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self.size = 0
        self.num_live = 0
        self.state = np.zeros((num_columns, FIRST_CAPACITY), np.uint8)
        self.slot = np.zeros((num_columns, FIRST_CAPACITY), np.int32)
        self.pins = np.zeros((num_columns, FIRST_CAPACITY), np.int32)
        self.node = np.zeros(FIRST_CAPACITY, np.int32)
        self.parent = np.zeros(FIRST_CAPACITY, np.int32)
        self.depth = np.zeros(FIRST_CAPACITY, np.int32)
        self.busy = np.zeros(FIRST_CAPACITY, np.int32)
        self.hints = np.zeros(FIRST_CAPACITY, np.uint8)
        self.keys = np.zeros((FIRST_CAPACITY, KEY_BYTES), np.uint8)
        self.keyed = np.zeros(FIRST_CAPACITY, np.bool_)
        self.found = np.zeros(FIRST_CAPACITY, np.bool_)
        self.totals = [[0] * len(Residency) for _ in range(num_columns)]
        self.pinned = [0] * num_columns
        self.evictable = [0] * num_columns
        self.hint_only = 0
        self._freed: BlockIds = np.empty(0, np.int32)
        self._num_freed = 0

    def _grow(self, needed: int) -> None:
        capacity, used = len(self.node), self.size
        if needed <= capacity:
            return
        while capacity < needed:
            capacity *= 2
        for name in PER_COLUMN:
            old = getattr(self, name)
            new = np.zeros((self.num_columns, capacity), old.dtype)
            new[:, :used] = old[:, :used]
            setattr(self, name, new)
        for name in PER_BLOCK:
            old = getattr(self, name)
            new = np.zeros((capacity, *old.shape[1:]), old.dtype)
            new[:used] = old[:used]
            setattr(self, name, new)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays' part that has been used."""
        rows = [getattr(self, name) for name in PER_COLUMN + PER_BLOCK]
        total: int = sum(row.nbytes for row in rows)
        return total * self.size // len(self.node) + self._freed.nbytes

    # ---- ids -------------------------------------------------------------------------------------

    def new(self, n: int, node: int, parent: int, depth: int) -> BlockIds:
        """`n` ids for a run of blocks of `node`, the first below block `parent` at `depth`."""
        recycled = min(n, self._num_freed)
        fresh = n - recycled
        self._grow(self.size + fresh)
        ids = np.empty(n, np.int32)
        self._num_freed -= recycled
        ids[:recycled] = self._freed[self._num_freed : self._num_freed + recycled]
        ids[recycled:] = np.arange(self.size, self.size + fresh, dtype=np.int32)
        self.size += fresh
        self.num_live += n
        self.node[ids] = node
        self.depth[ids] = np.arange(depth, depth + n, dtype=np.int32)
        self.parent[ids[0]] = parent
        self.parent[ids[1:]] = ids[:-1]
        self.keyed[ids] = False
        self.found[ids] = False
        return ids

    def free(self, ids: BlockIds) -> None:
        """Recycle ids whose blocks no column, hint or pin knows. The caller has made sure."""
        end = self._num_freed + len(ids)
        if end > len(self._freed):
            grown = np.empty(max(FIRST_CAPACITY, 2 * end), np.int32)
            grown[: self._num_freed] = self._freed[: self._num_freed]
            self._freed = grown
        self._freed[self._num_freed : end] = ids
        self._num_freed = end
        self.num_live -= len(ids)
        self.node[ids] = 0

    def freed(self) -> BlockIds:
        """The ids waiting to be recycled."""
        return self._freed[: self._num_freed].copy()

    def living(self, ids: BlockIds) -> BlockIds:
        """Those of `ids` that name a block."""
        living: BlockIds = ids[self.node[ids] != 0]
        return living

    def idle(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Which blocks no pool, pin or hint knows."""
        idle: npt.NDArray[np.bool_] = (self.busy[ids] | self.hints[ids]) == 0
        return idle

    # ---- what must hold before anything changes --------------------------------------------------

    def require_live(self, ids: BlockIds) -> None:
        """Raise `IndexCorrupt` unless every id names a block, each once."""
        if not len(ids):
            return
        if int(ids.min()) < 0 or int(ids.max()) >= self.size or not self.node[ids].all():
            inside = (ids >= 0) & (ids < self.size)
            dead = ids[~inside | (self.node[np.where(inside, ids, 0)] == 0)]
            raise IndexCorrupt(f"block {int(dead[0])}: no such block")
        self.require_once(ids)

    def require_once(self, ids: BlockIds) -> None:
        """Raise `IndexCorrupt` if an id occurs twice."""
        if len(ids) < 2:
            return
        # A root-first or leaf-first run cannot repeat a block; anything else is sorted.
        parents = self.parent[ids]
        if np.array_equal(parents[1:], ids[:-1]) or np.array_equal(parents[:-1], ids[1:]):
            return
        ordered = np.sort(ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise IndexCorrupt(f"block {int(twice[0])}: named twice in one call")

    def require_state(self, col: int, ids: BlockIds, wanted: Residency) -> None:
        """Raise `IndexCorrupt` unless all of `ids` are in this state."""
        found = self.state[col, ids]
        wrong = found != wanted
        if wrong.any():
            at = int(wrong.argmax())
            raise IndexCorrupt(
                f"column {col}, block {int(ids[at])}: is {Residency(int(found[at])).name}, "
                f"not {wanted.name}"
            )

    # ---- changes; the counts follow --------------------------------------------------------------

    def move(self, col: int, ids: BlockIds, old: Residency, new: Residency) -> None:
        """Blocks of a column go from one state to another."""
        self.state[col, ids] = new
        for state, change in ((old, -len(ids)), (new, len(ids))):
            if state != ABSENT:
                self.totals[col][state] += change
        if RESIDENT in (old, new):
            unpinned = int(np.count_nonzero(self.pins[col, ids] == 0))
            self.evictable[col] += unpinned if new == RESIDENT else -unpinned

    def add_busy(self, ids: BlockIds, change: int) -> None:
        """One reason more (1) or less (-1) for each block to live."""
        before = self.busy[ids]
        after = before + np.int32(change)
        idle = (before if change > 0 else after) == 0
        alone = int(np.count_nonzero(idle & (self.hints[ids] > 0)))
        self.hint_only += -alone if change > 0 else alone
        self.busy[ids] = after

    def add_pins(self, col: int, ids: BlockIds, change: int) -> None:
        """One pin more (1) or less (-1) on each block."""
        before = self.pins[col, ids]
        after = before + np.int32(change)
        self.pins[col, ids] = after
        edge = (before if change > 0 else after) == 0  # first pin, or last
        resident = edge & (self.state[col, ids] == RESIDENT)
        self.pinned[col] += change * int(np.count_nonzero(edge))
        self.evictable[col] -= change * int(np.count_nonzero(resident))
        self.add_busy(ids, change)

    def set_hints(self, col: int, ids: BlockIds) -> BlockIds:
        """Set a store's hints where they are not. Returns the blocks that had no hint at all."""
        new = ids[self.state[col, ids] == ABSENT]
        first: BlockIds = new[self.hints[new] == 0]
        self.move(col, new, ABSENT, RESIDENT)
        self.hints[new] += np.uint8(1)
        self.hint_only += int(np.count_nonzero(self.busy[first] == 0))
        return first

    def clear_hints(self, col: int, ids: BlockIds) -> BlockIds:
        """Clear a store's hints where they are set. Returns the blocks left with no hint at all."""
        gone = ids[self.state[col, ids] == RESIDENT]
        self.move(col, gone, RESIDENT, ABSENT)
        self.hints[gone] -= np.uint8(1)
        last: BlockIds = gone[self.hints[gone] == 0]
        self.hint_only -= int(np.count_nonzero(self.busy[last] == 0))
        return last

    # ---- keys ------------------------------------------------------------------------------------

    def put_keys(self, ids: BlockIds, keys: Sequence[BlockKey]) -> None:
        """Remember computed keys."""
        self.keys[ids] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(ids), KEY_BYTES)
        self.keyed[ids] = True

    def get_marks(self, ids: BlockIds) -> npt.NDArray[np.uint64]:
        """The first eight bytes of each key, 0 for a block that has not been keyed."""
        heads = np.ascontiguousarray(self.keys[ids, :8]).view("<u8").reshape(-1)
        return np.where(self.keyed[ids], heads, np.uint64(0))

    def get_keys(self, ids: BlockIds) -> list[BlockKey]:
        """The keys of blocks that have been keyed."""
        data = self.keys[ids].tobytes()
        return [BlockKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
