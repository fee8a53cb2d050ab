"""What no cache can beat on a trace: one without bounds, and one that knows the future.

Block by block over chained ids; knows no tiers. Belady's rule is applied to leaves, and a block
that is used later than all that is held, or never again, is not taken in (MIN with bypass).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from kvtier.index.words import Tokens


def infinite(requests: Sequence[Tokens]) -> int:
    """Blocks a cache without bounds would hit."""
    seen: set[int] = set()
    hits = 0
    for blocks in requests:
        ids = blocks.tolist()
        hits += sum(id in seen for id in ids)
        seen.update(ids)
    return hits


def belady(requests: Sequence[Tokens], capacity: int) -> int:
    """Blocks hit by a cache that evicts the leaf used furthest ahead, and does not take in what is
    used later still, or never again."""
    never = len(requests)
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for turn, blocks in enumerate(requests):
        for id in blocks.tolist():
            uses[id].append(turn)
    parent: dict[int, int] = {}
    children: defaultdict[int, int] = defaultdict(int)
    due: dict[int, int] = {}  # held blocks: when each is used next
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, id) of leaves, some stale
    depth: dict[int, int] = {}
    hits = 0
    for turn, blocks in enumerate(requests):
        ids = blocks.tolist()
        hit = 0
        while hit < len(ids) and ids[hit] in due:
            hit += 1
        hits += hit
        path = set(ids)
        stash: list[tuple[int, int, int]] = []
        for position, id in enumerate(ids):
            later = uses[id]
            after = bisect_right(later, turn)
            following = later[after] if after < len(later) else never
            if position >= hit:
                if following == never:
                    break
                if len(due) >= capacity:
                    victim = None
                    while heap:
                        minus, _, other = heap[0]
                        if due.get(other) != -minus or children[other]:
                            heappop(heap)
                        elif other in path:
                            stash.append(heappop(heap))
                        else:
                            victim = other
                            break
                    if victim is None or due[victim] <= following:
                        break
                    heappop(heap)
                    del due[victim]
                    above = parent.get(victim, -1)
                    if above >= 0:
                        children[above] -= 1
                        if not children[above]:
                            heappush(heap, (-due[above], -depth[above], above))
                if position:
                    parent[id] = ids[position - 1]
                    children[ids[position - 1]] += 1
                depth[id] = position
            due[id] = following
            if not children[id]:
                heappush(heap, (-following, -position, id))
        for entry in stash:
            heappush(heap, entry)
        for id in ids:
            if id in due and not children[id]:
                heappush(heap, (-due[id], -depth[id], id))
    return hits
