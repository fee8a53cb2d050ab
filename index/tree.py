"""The shape of the index: a path-compressed radix tree over token ids, cut at block boundaries.

Nodes hold runs of block ids. Tokens are compared as bytes, so a match costs what memcmp costs and
a hash collision cannot serve wrong data. The idea is RadixAttention's (Zheng et al., SGLang, 2024);
here nodes are cut at blocks only and own ids, not slots. Knows nothing of tiers, residency or
eviction; who needs to know that a node was split is told by a callback.
"""

from collections.abc import Callable, Iterator

import numpy as np

from kvtier.index.blocks import BlockTable, IndexCorrupt
from kvtier.index.words import BlockIds, Tokens

# Tails are looked at in windows that double, so that a long run costs what is taken from it.
FIRST_WINDOW = 16

NO_BLOCKS: BlockIds = np.empty(0, np.int32)


class Node:
    """A run of blocks with no branch inside. The root of a namespace holds none.

    `data` is the run's token ids as native int32 bytes, `start` the number of blocks above it,
    `number` its place in `Tree.nodes` (0 for a root). `held`, `twigs` and `newcomer` are kept by
    `Lanes`: per lane, own blocks held and children that lead to held blocks; a bit per lane.
    """

    __slots__ = (
        "children",
        "data",
        "held",
        "ids",
        "namespace",
        "newcomer",
        "number",
        "parent",
        "start",
        "twigs",
    )

    def __init__(
        self, namespace: bytes, parent: "Node | None", start: int, data: bytes, lanes: int
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.data = data
        self.ids: BlockIds = NO_BLOCKS
        self.children: dict[bytes, Node] = {}
        self.number = 0
        self.held = [0] * lanes
        self.twigs = [0] * lanes
        self.newcomer = 0

    def __repr__(self) -> str:
        return (
            f"Node({self.number}: blocks {self.start}..{self.start + len(self.ids)}, "
            f"{len(self.children)} children)"
        )


class Tree:
    """Roots by namespace, nodes by number. Every method leaves the tree whole or raises first.

    `lanes` is the length of each node's counters; `on_split(upper, lower)` is called when `upper`
    has just taken the head of `lower`'s run.
    """

    def __init__(
        self,
        block_size: int,
        table: BlockTable,
        lanes: int,
        on_split: Callable[[Node, Node], None],
    ) -> None:
        self.stride = 4 * block_size
        self.roots: dict[bytes, Node] = {}
        self.nodes: list[Node | None] = [None]  # number 0 marks a free block
        self.num_nodes = 0
        self.num_leaves = 0
        self._numbers: list[int] = []
        self._table = table
        self._lanes = lanes
        self._on_split = on_split

    # ---- reading ---------------------------------------------------------------------------------

    def match(self, namespace: bytes, tokens: Tokens) -> BlockIds:
        """Ids of the longest run of blocks that is a prefix of `tokens`, root first."""
        node = self.roots.get(namespace)
        if node is None:
            return NO_BLOCKS.copy()
        data = tokens.tobytes()
        _, _, parts = self._walk(node, data)
        return np.concatenate(parts) if parts else NO_BLOCKS.copy()

    def _walk(self, node: Node, data: bytes) -> tuple[Node, int, list[BlockIds]]:
        """Follow `data` down: the last node entered, how many of its blocks match, and all ids."""
        stride, offset = self.stride, 0
        parts: list[BlockIds] = []
        matched = len(node.ids)
        while True:
            child = node.children.get(data[offset : offset + stride])
            if child is None:
                return node, matched, parts
            node = child
            # startswith at an offset is memcmp without a slice; numpy only at the mismatch.
            if data.startswith(node.data, offset):
                matched = len(node.ids)
                parts.append(node.ids)
                offset += len(node.data)
                continue
            matched = self._common(node.data, data, offset)
            parts.append(node.ids[:matched])
            return node, matched, parts

    def _common(self, run: bytes, data: bytes, offset: int) -> int:
        """Whole blocks that `run` and `data[offset:]` share, fewer than `run` has."""
        n = min(len(run), len(data) - offset) // 4
        ours = np.frombuffer(run, np.int32, n)
        theirs = np.frombuffer(data, np.int32, n, offset)
        differ = ours != theirs
        same = int(differ.argmax()) if differ.any() else n
        return same * 4 // self.stride

    def owner(self, block: int) -> Node:
        """The node that holds a block now."""
        node = self.nodes[int(self._table.node[block])]
        if node is None:
            raise IndexCorrupt(f"block {block}: no such block")
        return node

    def runs(self, ids: BlockIds) -> list[tuple[Node, int, int]]:
        """Cut `ids` where the node changes: `(node, begin, end)` positions in `ids`."""
        if not len(ids):
            return []
        owners = self._table.node[ids]
        cuts = (np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()
        begins, ends = [0, *cuts], [*cuts, len(ids)]
        found: list[tuple[Node, int, int]] = []
        for number, begin, end in zip(owners[begins].tolist(), begins, ends, strict=True):
            node = self.nodes[number]
            if node is None:
                raise IndexCorrupt(f"block {int(ids[begin])}: no such block")
            found.append((node, begin, end))
        return found

    def path(self, block: int) -> BlockIds:
        """The block and its ancestors, root first."""
        node = self.owner(block)
        parts = [node.ids[: int(self._table.depth[block]) - node.start + 1]]
        while node.parent is not None:
            node = node.parent
            parts.append(node.ids)
        return np.concatenate(parts[::-1])

    def tokens_of(self, ids: BlockIds) -> Tokens:
        """Token ids of blocks, in order: int32 `[len(ids) * block_size]`, the caller's own copy."""
        parts = []
        for node, begin, end in self.runs(ids):
            at = (int(self._table.depth[ids[begin]]) - node.start) * self.stride
            parts.append(node.data[at : at + (end - begin) * self.stride])
        return np.frombuffer(bytearray(b"".join(parts)), np.int32)

    def below(self, ids: BlockIds) -> BlockIds:
        """`ids` and every block below any of them, each once."""
        first: dict[Node, int] = {}
        for node, begin, end in self.runs(ids):
            at = int(self._table.depth[ids[begin:end]].min()) - node.start
            first[node] = min(at, first.get(node, at))
        seen: dict[Node, int] = {}
        todo = list(first.items())
        while todo:
            node, at = todo.pop()
            if node in seen and seen[node] <= at:
                continue
            seen[node] = at
            todo += [(child, 0) for child in node.children.values()]
        parts = [node.ids[at:] for node, at in seen.items()]
        return np.concatenate(parts) if parts else NO_BLOCKS.copy()

    def walk_nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    # ---- growing ---------------------------------------------------------------------------------

    def insert(self, namespace: bytes, tokens: Tokens) -> BlockIds:
        """Ids of every whole block of `tokens`, root first; the missing ones are created."""
        whole = len(tokens) * 4 // self.stride * self.stride
        if not whole:
            return NO_BLOCKS.copy()
        data = tokens.tobytes()[:whole]
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, 0, b"", self._lanes)
        node, matched, parts = self._walk(root, data)
        known = sum(map(len, parts))
        rest = data[known * self.stride :]
        if rest:
            if matched < len(node.ids):
                node = self._split(node, matched)
            # A leaf grows in place: a sequence decoded block by block stays one node.
            grow = node.parent is not None and not node.children
            parts.append(self._extend(node, rest) if grow else self._attach(node, rest))
        return np.concatenate(parts)

    def cut_below(self, block: int) -> Node:
        """The node that ends with `block`, made by a split if need be."""
        node = self.owner(block)
        at = int(self._table.depth[block]) - node.start + 1
        return node if at == len(node.ids) else self._split(node, at)

    def _extend(self, node: Node, data: bytes) -> BlockIds:
        ids = self._table.new(
            len(data) // self.stride, node.number, int(node.ids[-1]), node.start + len(node.ids)
        )
        node.ids = np.concatenate((node.ids, ids))
        node.data += data
        return ids

    def _attach(self, above: Node, data: bytes) -> BlockIds:
        node = Node(above.namespace, above, above.start + len(above.ids), data, self._lanes)
        self._register(node)
        parent = int(above.ids[-1]) if len(above.ids) else -1
        node.ids = self._table.new(len(data) // self.stride, node.number, parent, node.start)
        self.num_leaves += 1  # `above` is a root or has a child: a childless node grows instead
        above.children[data[: self.stride]] = node
        return node.ids.copy()

    def _split(self, lower: Node, at: int) -> Node:
        """Cut before block `at`; the new node is the upper part, so `lower`'s children stay put."""
        above = lower.parent
        assert above is not None, "a root holds no blocks to split"
        upper = Node(
            lower.namespace, above, lower.start, lower.data[: at * self.stride], self._lanes
        )
        self._register(upper)
        upper.ids, lower.ids = lower.ids[:at].copy(), lower.ids[at:].copy()
        self._table.node[upper.ids] = upper.number
        lower.data = lower.data[at * self.stride :]
        lower.start += at
        lower.parent = upper
        above.children[upper.data[: self.stride]] = upper
        upper.children[lower.data[: self.stride]] = lower
        self._on_split(upper, lower)
        return upper

    def _register(self, node: Node) -> None:
        if self._numbers:
            node.number = self._numbers.pop()
            self.nodes[node.number] = node
        else:
            node.number = len(self.nodes)
            self.nodes.append(node)
        self.num_nodes += 1

    # ---- shrinking -------------------------------------------------------------------------------

    def prune(self, node: Node) -> None:
        """Free the idle tail of a childless node, and go on upward while nodes come to nothing."""
        while node.parent is not None and not node.children:
            above, keep = node.parent, self._num_kept(node)
            if keep < len(node.ids):
                self._trim(node, keep)
            if keep:
                return
            node = above

    def _num_kept(self, node: Node) -> int:
        """Leading blocks of a node, up to the last that is not idle."""
        end, window = len(node.ids), FIRST_WINDOW
        while end > 0:
            begin = max(0, end - window)
            idle = self._table.idle(node.ids[begin:end])
            if not idle.all():
                return end - int(idle[::-1].argmin())
            end, window = begin, 2 * window
        return 0

    def _trim(self, node: Node, keep: int) -> None:
        """Free all but the first `keep` blocks of a childless node; with none left it goes."""
        self._table.free(node.ids[keep:])
        if keep:
            node.ids = node.ids[:keep].copy()
            node.data = node.data[: keep * self.stride]
            return
        above = node.parent
        assert above is not None, "a root holds no blocks to trim"
        del above.children[node.data[: self.stride]]
        self.nodes[node.number] = None
        self._numbers.append(node.number)
        self.num_nodes -= 1
        self.num_leaves -= 1
        node.ids, node.data = NO_BLOCKS, b""
        if not above.children:
            if above.parent is None:
                del self.roots[above.namespace]
            else:
                self.num_leaves += 1
