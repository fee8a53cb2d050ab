"""One memory of requests for all pools of an index: every policy that follows experts shares it.

A request is walked down the ghost tree once, and shown to the experts of each pool. Pools of
different sizes remember what the largest one does. Knows neither pools nor blocks.
"""

from collections.abc import Sequence

from kvtier.index.follow import Follow
from kvtier.index.ghosts import GhostTree


class Shadows:
    """The ghost tree of these policies, which must not have seen a request yet."""

    def __init__(self, followers: Sequence[Follow]) -> None:
        self._followers = tuple(followers)
        self._tree = GhostTree(max((each.remembered for each in followers), default=0))
        self._clock = 0
        for each in followers:
            each.watch(self._tree)

    def __len__(self) -> int:
        """How many policies want to be told of requests."""
        return len(self._followers)

    def requested(self, marks: bytes) -> None:
        """A request asks for the path with these `fingerprints`, whoever holds it."""
        if not marks:
            return
        self._clock += 1
        path, known = self._tree.path(marks, self._clock)
        for each in self._followers:
            each.show(path, known, self._clock)
        self._tree.forget()
        for each in self._followers:
            each.adapt()
