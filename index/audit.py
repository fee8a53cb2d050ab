"""The integrity check of the index: every link and count, recomputed from scratch.

Reads the tree, the table and the eviction orders; trusts none of them, changes none of them.
"""

import numpy as np

from kvtier.index.blocks import BlockTable, IndexCorrupt
from kvtier.index.lanes import Lanes
from kvtier.index.tree import Node, Tree
from kvtier.index.words import ROOT_KEY, Residency, block_keys


def audit(
    tree: Tree,
    table: BlockTable,
    lanes: Lanes,
    store_cols: tuple[int, ...],
    block_size: int,
) -> None:
    """Raise `IndexCorrupt` naming the first thing that contradicts another."""
    nodes = list(tree.walk_nodes())
    for node in nodes:
        _check_node(tree, table, node)
    _check_ids(tree, table, nodes)
    _check_columns(table, store_cols)
    _check_counts(table)
    for lane in lanes.policies:
        _check_lane(lanes, nodes, lane)
    _check_keys(tree, table, nodes, block_size)


def _fail_if(wrong: bool, message: str) -> None:
    if wrong:
        raise IndexCorrupt(message)


def _check_node(tree: Tree, table: BlockTable, node: Node) -> None:
    ids, above = node.ids, node.parent
    if above is None:
        raise IndexCorrupt(f"{node}: a node without a parent hangs in the tree")
    _fail_if(not len(ids), f"{node}: holds no blocks")
    _fail_if(len(node.data) != len(ids) * tree.stride, f"{node}: tokens and ids differ in length")
    _fail_if(tree.nodes[node.number] is not node, f"{node}: is not the node of that number")
    _fail_if(above.children.get(node.data[: tree.stride]) is not node, f"{node}: is not found")
    _fail_if(node.namespace != above.namespace, f"{node}: changes namespace")
    _fail_if(node.start != above.start + len(above.ids), f"{node}: starts at the wrong depth")
    _fail_if(bool((table.node[ids] != node.number).any()), f"{node}: a block names another node")
    depths = np.arange(node.start, node.start + len(ids))
    _fail_if(bool((table.depth[ids] != depths).any()), f"{node}: a block has the wrong depth")
    first_parent = int(above.ids[-1]) if len(above.ids) else -1
    parents = np.concatenate(([first_parent], ids[:-1]))
    _fail_if(bool((table.parent[ids] != parents).any()), f"{node}: a block has the wrong parent")


def _check_ids(tree: Tree, table: BlockTable, nodes: list[Node]) -> None:
    owned = np.concatenate([node.ids for node in nodes]) if nodes else np.empty(0, np.int32)
    owners = np.bincount(owned, minlength=table.size)
    freed = np.bincount(table.freed(), minlength=table.size)
    _fail_if(bool((owners + freed != 1).any()), "an id is in two places, or in none")
    _fail_if(bool(((table.node[: table.size] == 0) != (freed == 1)).any()), "a freed id has a node")
    _fail_if(len(owned) != table.num_live, f"{len(owned)} blocks, counted {table.num_live}")
    _fail_if(len(nodes) != tree.num_nodes, f"{len(nodes)} nodes, counted {tree.num_nodes}")
    leaves = sum(not node.children for node in nodes)
    _fail_if(leaves != tree.num_leaves, f"{leaves} leaves, counted {tree.num_leaves}")
    known = sum(node is not None for node in tree.nodes)
    _fail_if(known != len(nodes), f"{len(nodes)} nodes in the tree, {known} by number")
    empty = [root for root in tree.roots.values() if not root.children]
    _fail_if(bool(empty), "a namespace without blocks was kept")
    dead = np.flatnonzero(freed)
    for name, row in (("busy", table.busy), ("hints", table.hints)):
        _fail_if(bool(row[dead].any()), f"{name}: set for a freed id")
    for name, rows in (("state", table.state), ("pins", table.pins)):
        _fail_if(bool(rows[:, dead].any()), f"{name}: set for a freed id")


def _check_columns(table: BlockTable, store_cols: tuple[int, ...]) -> None:
    size = table.size
    busy = np.zeros(size, np.int64)
    hints = np.zeros(size, np.int64)
    for col in range(table.num_columns):
        state, pins = table.state[col, :size], table.pins[col, :size]
        present = state != Residency.ABSENT
        _fail_if(bool((pins < 0).any()), f"column {col}: a negative number of pins")
        _fail_if(bool((state > Residency.LEAVING).any()), f"column {col}: an unknown state")
        busy += pins
        if col in store_cols:
            wrong = present & (state != Residency.RESIDENT)
            _fail_if(bool(wrong.any()), f"column {col}: a hint that is neither set nor clear")
            hints += present
        else:
            slots = table.slot[col, :size][present]
            _fail_if(bool((slots < 0).any()), f"column {col}: a block without a slot")
            _fail_if(len(np.unique(slots)) != len(slots), f"column {col}: a slot used twice")
            busy += present
    _fail_if(bool((busy != table.busy[:size]).any()), "busy: does not add up")
    _fail_if(bool((hints != table.hints[:size]).any()), "hints: do not add up")


def _check_counts(table: BlockTable) -> None:
    size = table.size
    for col, totals in enumerate(table.totals):
        states = np.bincount(table.state[col, :size], minlength=len(Residency)).tolist()
        _fail_if(states[1:] != totals[1:], f"column {col}: states {states}, counted {totals}")
        pinned = int(np.count_nonzero(table.pins[col, :size]))
        _fail_if(pinned != table.pinned[col], f"column {col}: {pinned} blocks pinned, miscounted")
        free = (table.state[col, :size] == Residency.RESIDENT) & (table.pins[col, :size] == 0)
        evictable = int(np.count_nonzero(free))
        _fail_if(evictable != table.evictable[col], f"column {col}: {evictable} may go, miscounted")
    alone = int(np.count_nonzero((table.hints[:size] > 0) & (table.busy[:size] == 0)))
    _fail_if(alone != table.hint_only, f"{alone} blocks by hints alone, counted {table.hint_only}")


def _check_lane(lanes: Lanes, nodes: list[Node], lane: int) -> None:
    """`nodes` come parents first, so going backwards sees every child before its parent."""
    flags = lanes.flags(lane)
    twigs: dict[Node, int] = {}
    holders: set[Node] = set()
    for node in reversed(nodes):
        held = int(np.count_nonzero(flags[node.ids]))
        _fail_if(held != node.held[lane], f"lane {lane}, {node}: holds {held}")
        _fail_if(twigs.get(node, 0) != node.twigs[lane], f"lane {lane}, {node}: twigs are off")
        if held:
            holders.add(node)
        if (held or twigs.get(node, 0)) and node.parent is not None:
            twigs[node.parent] = twigs.get(node.parent, 0) + 1
    stray = set(lanes.retired[lane]) - holders
    _fail_if(bool(stray), f"lane {lane}: {len(stray)} retired nodes hold nothing")
    order = list(lanes.policies[lane])
    _fail_if(len(order) != len(holders), f"lane {lane}: {len(order)} in order, {len(holders)} hold")
    _fail_if(
        set(order) != holders, f"lane {lane}: the order names other nodes than those that hold"
    )


def _check_keys(tree: Tree, table: BlockTable, nodes: list[Node], block_size: int) -> None:
    for node in nodes:
        keyed = table.keyed[node.ids]
        n = int(np.count_nonzero(keyed))
        if not n:
            continue
        _fail_if(not bool(keyed[:n].all()), f"{node}: a block is keyed, its parent is not")
        above = ROOT_KEY
        parent = int(table.parent[node.ids[0]])
        if parent >= 0:
            _fail_if(not table.keyed[parent], f"{node}: a block is keyed, its parent is not")
            above = table.get_keys(np.array([parent], np.int32))[0]
        tokens = tree.tokens_of(node.ids[:n])
        keys = block_keys(node.namespace, above, tokens, block_size)
        _fail_if(keys != table.get_keys(node.ids[:n]), f"{node}: a remembered key is wrong")
