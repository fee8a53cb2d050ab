"""Which live nodes stand for which ghosts, for one pool. Knows neither experts nor residency."""

from collections.abc import Sequence

from kvtier.index.ghosts import ROOT, Ghost, GhostTree
from kvtier.index.tree import Node


class Ties:
    """Both ways: the ghost of a node's last block, and the node that has blocks of a ghost.

    Live nodes and ghosts are cut in different places and forgotten at different times.
    """

    def __init__(self, tree: GhostTree) -> None:
        self._tree = tree
        self._ghosts: dict[Node, tuple[Ghost, int]] = {}
        self._nodes: dict[Ghost, Node] = {}
        self._gone: list[Ghost] = []
        tree.listeners.append(self)

    def __contains__(self, node: Node) -> bool:
        return node in self._ghosts

    def tie(self, node: Node, found: Sequence[Ghost]) -> None:
        """`found` are the ghosts on the path to the node, root first."""
        ghost = found[-1] if found else ROOT
        self._ghosts[node] = ghost, self._tree.birth[ghost]
        for each in reversed(found):
            if self._tree.end(each) <= node.start:
                break
            self._nodes[each] = node

    def removed(self, node: Node) -> None:
        """The pool holds nothing of the node any more."""
        if node not in self._ghosts:
            return
        ghost = self.ghost(node)
        while ghost != ROOT and self._tree.end(ghost) > node.start:
            if self._nodes.get(ghost) is node:
                del self._nodes[ghost]
            ghost = self._tree.parent[ghost]
        del self._ghosts[node]

    def ghost(self, node: Node) -> Ghost:
        """The ghost of a tied node; `ROOT` if there was none, or it was forgotten since."""
        ghost, birth = self._ghosts[node]
        gone = self._tree.parent[ghost] < 0 or self._tree.birth[ghost] != birth
        return ROOT if gone else ghost

    def node(self, ghost: Ghost) -> Node | None:
        """The tied node that was found last to have blocks of the ghost."""
        node = self._nodes.get(ghost)
        return node if node in self._ghosts else None

    def split(self, upper: Ghost, lower: Ghost) -> None:
        """The tree cut a ghost."""
        node = self._nodes.get(lower)
        if node is not None:
            self._nodes[upper] = node

    def forgotten(self, ghost: Ghost) -> None:
        """The tree dropped a ghost. It may be asked about until `clear`."""
        self._gone.append(ghost)

    def clear(self) -> None:
        """Cut the ties of what the tree dropped. To be called before its rows are used again."""
        for ghost in self._gone:
            self._nodes.pop(ghost, None)
        self._gone.clear()
