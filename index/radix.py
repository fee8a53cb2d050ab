"""The radix index: which blocks exist, where each stands in each tier, and what may leave.

Puts a residency automaton, pins and an eviction order per column on top of the tree of blocks.
Columns are addressed by position, fastest first. A pool's column is the truth; a store's column
(`stores`) is a hint, RESIDENT or ABSENT. Knows no bytes, slots only as numbers, no clock and no
threads: the caller holds the lock. Every method either does all of its work or raises
`IndexCorrupt` and has changed nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtier.index.audit import audit
from kvtier.index.blocks import BlockTable, IndexCorrupt
from kvtier.index.counts import ColumnStatistics, IndexStatistics
from kvtier.index.follow import Follow
from kvtier.index.ghosts import fingerprints
from kvtier.index.lanes import Lanes
from kvtier.index.lookahead import Lookahead, Waiting
from kvtier.index.policy import EvictionPolicy, LeafLru
from kvtier.index.shadows import Shadows
from kvtier.index.tree import Node, Tree
from kvtier.index.views import HintView, PoolView
from kvtier.index.words import (
    ROOT_KEY,
    BlockIds,
    BlockKey,
    Residency,
    Slots,
    TierId,
    Tokens,
    block_keys,
)

ABSENT, FILLING = Residency.ABSENT, Residency.FILLING
RESIDENT, LEAVING = Residency.RESIDENT, Residency.LEAVING

__all__ = ["IndexCorrupt", "RadixIndex"]


def _leaf_lru(tier: TierId) -> EvictionPolicy[Node]:
    return LeafLru[Node]()


class RadixIndex:
    """Blocks by token prefix, with stable int32 ids, and their state in every column.

    An id lives while a pool holds the block in any state, a pin or a hint names it, or a block
    below it lives. An id fresh from `insert` has none of these: pin it, fill it or hint it before
    the next call that can free blocks, and `forget` it if nothing comes of it.

    `policy(tier)` makes the eviction order of one pool; leaf-LRU unless given. `protectable` says
    how many blocks of a pool `expect` may protect; none unless it does.
    """

    def __init__(
        self,
        block_size: int,
        columns: Sequence[TierId],
        *,
        stores: Sequence[TierId] = (),
        max_hint_blocks: int = 1_000_000,
        policy: Callable[[TierId], EvictionPolicy[Node]] = _leaf_lru,
        protectable: Mapping[TierId, int] = MappingProxyType({}),
    ) -> None:
        if block_size < 1 or not set(stores) <= set(columns) or len(set(columns)) != len(columns):
            raise ValueError(f"block size {block_size}, columns {columns}, stores {stores}")
        self.block_size = block_size
        self.columns = tuple(columns)
        self.stores = tuple(stores)
        self.max_hint_blocks = max_hint_blocks
        self._store_cols = tuple(c for c, tier in enumerate(columns) if tier in stores)
        self._table = BlockTable(len(columns))
        policies = {col: policy(tier) for col, tier in enumerate(columns) if tier not in stores}
        self._shadows = Shadows([p for p in policies.values() if isinstance(p, Follow)])
        policies[len(columns)] = LeafLru[Node]()
        self._lanes = Lanes(self._table, policies)
        self._tree = Tree(block_size, self._table, len(columns) + 1, self._lanes.split)
        most = [protectable.get(tier, 0) for tier in columns]
        self._lookahead = Lookahead(self._tree, self._table, most)

    def __repr__(self) -> str:
        s = self.statistics()
        tiers = ", ".join(
            f"{c.tier} {c.resident}+{c.filling}-{c.leaving} pinned {c.pinned}" for c in s.columns
        )
        return f"RadixIndex({s.blocks} blocks in {s.nodes} nodes; {tiers})"

    # ---- the tree --------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> BlockIds:
        """Ids of the longest run of known blocks that is a prefix of `tokens`, root first.

        Whole blocks only, whatever their residency. Changes nothing, touches nothing.
        """
        return self._tree.match(namespace, tokens)

    def insert(self, namespace: bytes, tokens: Tokens) -> BlockIds:
        """Ids of every whole block of `tokens`, root first; missing ones are made, ABSENT."""
        return self._tree.insert(namespace, tokens)

    def path(self, block: int) -> BlockIds:
        """The block and its ancestors, root first."""
        return self._tree.path(block)

    def parent(self, block: int) -> int:
        """The block above, -1 above a first block."""
        self._tree.owner(block)
        return int(self._table.parent[block])

    def parents(self, ids: BlockIds) -> BlockIds:
        """The block above each, -1 above a first block. Every id names a block."""
        self._table.require_live(ids)
        above: BlockIds = self._table.parent[ids]
        return above

    def depth(self, block: int) -> int:
        """How many blocks stand above it."""
        self._tree.owner(block)
        return int(self._table.depth[block])

    def namespace_of(self, block: int) -> bytes:
        """The digest the block was inserted under."""
        return self._tree.owner(block).namespace

    def tokens_of(self, ids: BlockIds) -> Tokens:
        """The token ids of these blocks, in order: int32 `[len(ids) * block_size]`, a copy."""
        return self._tree.tokens_of(ids)

    def keys(self, ids: BlockIds) -> list[BlockKey]:
        """Block keys of a root-first run of one branch; computed once, when first asked for."""
        if not len(ids):
            return []
        if not self._table.keyed[ids].all():
            self._compute_keys(int(ids[-1]))
        return self._table.get_keys(ids)

    def marks(self, ids: BlockIds) -> npt.NDArray[np.uint64]:
        """The first eight bytes of each block's key, uint64; 0 where it has none yet (`keys`)."""
        return self._table.get_marks(ids)

    def parent_key(self, block: int) -> BlockKey:
        """The key of the block above, `ROOT_KEY` above a first block."""
        self._tree.owner(block)
        parent = int(self._table.parent[block])
        if parent < 0:
            return ROOT_KEY
        return self.keys(np.array([parent], np.int32))[0]

    def _compute_keys(self, block: int) -> None:
        """Key `block` and all above it. What is keyed already is a head of that path."""
        path = self._tree.path(block)
        done = int(np.count_nonzero(self._table.keyed[path]))
        above = self._table.get_keys(path[done - 1 : done])[0] if done else ROOT_KEY
        tail = path[done:]
        tokens = self._tree.tokens_of(tail)
        keys = block_keys(self.namespace_of(block), above, tokens, self.block_size)
        self._table.put_keys(tail, keys)

    def request(self, namespace: bytes, tokens: Tokens) -> None:
        """A request asks for these tokens: tell the policies, which may learn from what is not
        here. Call it once a request, before its path is touched."""
        if self._shadows:
            self._shadows.requested(fingerprints(namespace, tokens, self.block_size))

    def expect(self, waiting: Sequence[Waiting]) -> None:
        """Requests that will ask for these tokens soon, the next one first, in place of those named
        before. Victims are taken elsewhere first: see `victims`."""
        self._lookahead.expect(waiting)

    # ---- use -------------------------------------------------------------------------------------

    def touch(self, col: int, ids: BlockIds) -> None:
        """Mark the path that ends with these blocks most recently used, in `col` and as a hint.

        A run of which only the head was used is cut there: its rest keeps its age.
        """
        if len(ids):
            self._lanes.touch(col, self._tree.cut_below(int(ids[-1])))

    def touch_cold(self, col: int, ids: BlockIds) -> None:
        """Blocks just promoted enter at the cold end: they go first unless they are used again.

        A node goes there only if it came into the column since its last `touch` and leads to
        nothing but cold nodes, so a promotion never cools what was warm.
        """
        self._require_pool(col)
        if len(ids):
            self._lanes.cool(col, self._tree.owner(int(ids[-1])))

    def found(self, ids: BlockIds) -> None:
        """A request found these blocks here, which somebody else had made."""
        self._table.found[ids] = True

    def retire(self, col: int, made: BlockIds) -> None:
        """Whoever made these blocks (one branch, root first) is done: the last of them, below the
        deepest `found` one, are the first to leave `col`, until a path to them is used."""
        own = made[len(made) - _num_last(~self._table.found[made]) :]
        if len(own):
            above = self.parent(int(own[0]))
            if above >= 0:
                self._tree.cut_below(above)
            first = int(self._table.depth[own[0]])
            self._lanes.retire(col, self._tree.cut_below(int(own[-1])), first)

    # ---- residency -------------------------------------------------------------------------------

    def state(self, col: int, ids: BlockIds) -> npt.NDArray[np.uint8]:
        """`Residency` of each block, uint8; ABSENT for an id that names no block."""
        states: npt.NDArray[np.uint8] = self._table.state[col, ids]
        return states

    def slots(self, col: int, ids: BlockIds) -> Slots:
        """Slot of each block, int32; -1 where it is ABSENT and in a store's column."""
        if col in self._store_cols:
            return np.full(len(ids), -1, np.int32)
        return np.where(
            self._table.state[col, ids] != ABSENT, self._table.slot[col, ids], np.int32(-1)
        )

    def begin_fill(self, col: int, ids: BlockIds, slots: Slots) -> None:
        """ABSENT -> FILLING into these slots. The path counts as used."""
        self._require_pool(col)
        self._table.require_live(ids)
        self._table.require_state(col, ids, ABSENT)
        if len(slots) != len(ids) or (len(slots) and int(slots.min()) < 0):
            raise IndexCorrupt(f"column {col}: {len(ids)} blocks, slots {slots}")
        self._table.move(col, ids, ABSENT, FILLING)
        self._table.slot[col, ids] = slots
        self._table.add_busy(ids, 1)
        self._lanes.hold(col, self._tree.runs(ids))

    def finish_fill(self, col: int, ids: BlockIds) -> None:
        """FILLING -> RESIDENT: from now on the blocks may be matched, and evicted."""
        self._step(col, ids, FILLING, RESIDENT)

    def abort_fill(self, col: int, ids: BlockIds) -> Slots:
        """FILLING -> ABSENT. Returns the slots; blocks nothing else knows are forgotten."""
        return self._leave(col, ids, FILLING)

    def begin_leave(self, col: int, ids: BlockIds) -> None:
        """RESIDENT -> LEAVING; none may be pinned in `col`."""
        pinned = self._table.pins[col, ids] > 0
        if pinned.any():
            raise IndexCorrupt(f"column {col}, block {int(ids[pinned][0])}: is pinned")
        self._step(col, ids, RESIDENT, LEAVING)

    def cancel_leave(self, col: int, ids: BlockIds) -> None:
        """LEAVING -> RESIDENT, with its old place in the eviction order."""
        self._step(col, ids, LEAVING, RESIDENT)

    def finish_leave(self, col: int, ids: BlockIds) -> Slots:
        """LEAVING -> ABSENT. Returns the slots; blocks nothing else knows are forgotten."""
        return self._leave(col, ids, LEAVING)

    def _step(self, col: int, ids: BlockIds, old: Residency, new: Residency) -> None:
        self._require_pool(col)
        self._table.require_state(col, ids, old)
        self._table.require_once(ids)
        self._table.move(col, ids, old, new)

    def _leave(self, col: int, ids: BlockIds, old: Residency) -> Slots:
        self._step(col, ids, old, ABSENT)
        slots: Slots = self._table.slot[col, ids]
        self._table.add_busy(ids, -1)
        self._lanes.drop(col, self._tree.runs(ids))
        self._forget(ids)
        self._bound_hints()
        return slots

    # ---- hints -----------------------------------------------------------------------------------

    def set_hint(self, col: int, ids: BlockIds) -> None:
        """A store holds these blocks. The path counts as used.

        May push out the least recently used blocks that live by hints alone, in the extreme some
        of `ids` themselves: pin what you go on to use.
        """
        self._require_store(col)
        self._table.require_live(ids)
        first = self._table.set_hints(col, ids)
        self._lanes.hold(self._lanes.hint, self._tree.runs(first))
        self._lanes.use(self._lanes.hint, [node for node, _, _ in self._tree.runs(ids)])
        self._bound_hints()

    def clear_hint(self, col: int, ids: BlockIds) -> None:
        """A store refused these blocks: neither they nor anything below them is promised now.

        Ids that name no block any more are passed over.
        """
        self._require_store(col)
        self._clear(col, self._tree.below(self._table.living(ids)))

    def _clear(self, col: int, ids: BlockIds) -> None:
        last = self._table.clear_hints(col, ids)
        self._lanes.drop(self._lanes.hint, self._tree.runs(last))
        self._forget(last)

    def _bound_hints(self) -> None:
        """Drop blocks that live by hints alone, oldest leaves first, down to the bound."""
        while (excess := self._table.hint_only - self.max_hint_blocks) > 0:
            old = self._lanes.plan(self._lanes.hint, excess, excess, HintView(self._table))
            if not len(old):
                return  # the rest carries blocks that are in use
            for col in self._store_cols:
                self._clear(col, old)

    # ---- pins ------------------------------------------------------------------------------------

    def pin(self, col: int, ids: BlockIds) -> None:
        """Keep these blocks from starting to leave `col`, and their ids from being recycled.

        Legal in every state, ABSENT too; pins are counted.
        """
        self._table.require_live(ids)
        self._table.add_pins(col, ids, 1)

    def is_pinned(self, col: int, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Which of `ids` somebody pins in `col`."""
        pinned: npt.NDArray[np.bool_] = self._table.pins[col, ids] > 0
        return pinned

    def unpin(self, col: int, ids: BlockIds) -> None:
        """Undo one `pin` of each. Blocks that nothing else knows are forgotten."""
        unpinned = self._table.pins[col, ids] == 0
        if unpinned.any():
            raise IndexCorrupt(f"column {col}, block {int(ids[unpinned][0])}: is not pinned")
        self._table.require_once(ids)
        self._table.add_pins(col, ids, -1)
        self._forget(ids)
        self._bound_hints()

    def forget(self, ids: BlockIds) -> None:
        """Free those of `ids`, and above them, that are ABSENT everywhere, unpinned and childless.

        Ids that name no block any more are passed over.
        """
        self._forget(self._table.living(ids))

    def _forget(self, ids: BlockIds) -> None:
        if not self._table.idle(ids).any():
            return
        for node, begin, end in self._tree.runs(ids):
            if node.children or not len(node.ids):
                continue
            tail = node.ids[-1]  # most runs begin or end with it
            if tail == ids[begin] or tail == ids[end - 1] or tail in ids[begin:end]:
                self._tree.prune(node)

    # ---- eviction --------------------------------------------------------------------------------

    def victims(self, col: int, n: int, *, least: int | None = None) -> BlockIds:
        """Up to `n` RESIDENT, unpinned blocks of `col` in the order in which they should go.

        A plan: changes nothing. Leaves first, each from its tail: below a victim, `col` holds
        nothing but earlier victims. What is `expect`ed goes when there are not `least` (None: `n`)
        others.
        """
        self._require_pool(col)
        view = PoolView(self._table, col, self._lookahead.protected(col))
        return self._lanes.plan(col, n, n if least is None else least, view)

    def evictable(self, col: int) -> int:
        """How many blocks of a pool are RESIDENT and unpinned. A count kept by every change.

        `victims` may name fewer: a block above one that is pinned or in flight has to wait.
        """
        self._require_pool(col)
        return self._table.evictable[col]

    # ---- accounts --------------------------------------------------------------------------------

    def count(self, col: int, residency: Residency) -> int:
        """How many blocks of a column are in a state (not ABSENT). Kept by every change."""
        return self._table.totals[col][residency]

    def statistics(self) -> IndexStatistics:
        """Counts kept up to date by every change; costs nothing to ask."""
        return IndexStatistics(
            blocks=self._table.num_live,
            nodes=self._tree.num_nodes,
            leaves=self._tree.num_leaves,
            columns=tuple(
                ColumnStatistics(tier, t[RESIDENT], t[FILLING], t[LEAVING], pinned)
                for tier, t, pinned in zip(
                    self.columns, self._table.totals, self._table.pinned, strict=True
                )
            ),
            hint_only=self._table.hint_only,
        )

    def check(self) -> None:
        """Recompute every count and link from scratch; `IndexCorrupt` names the first that is off.

        Reads every block, so it takes seconds on a million of them.
        """
        audit(self._tree, self._table, self._lanes, self._store_cols, self.block_size)

    def _require_pool(self, col: int) -> None:
        if not 0 <= col < len(self.columns) or col in self._store_cols:
            raise IndexCorrupt(f"column {col}: is not a pool")

    def _require_store(self, col: int) -> None:
        if col not in self._store_cols:
            raise IndexCorrupt(f"column {col}: is not a store")


def _num_last(flags: npt.NDArray[np.bool_]) -> int:
    """How many entries at the end are all true."""
    return len(flags) if flags.all() else int(flags[::-1].argmin())
