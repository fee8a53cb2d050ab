"""One tier under the real index and a policy, without bytes: what a rule of eviction is worth."""

from collections.abc import Sequence

import numpy as np

from kvtier.index.lookahead import Waiting
from kvtier.index.policies import make_policy
from kvtier.index.policy import EvictionPolicy
from kvtier.index.radix import RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import Residency, TierId, Tokens
from kvtier.tiers.cache import PROTECTABLE

NAMESPACE = b"kvtier replay".ljust(32, b"\0")
"""All requests of a replay are of one model."""

COL = 0


class OneTier:
    """A tier under the real index, without bytes. The path of the request at hand is pinned."""

    def __init__(self, capacity: int, policy: EvictionPolicy[Node]) -> None:
        self.index = RadixIndex(
            1,
            (TierId.DRAM,),
            policy=lambda tier: policy,
            protectable={TierId.DRAM: capacity // PROTECTABLE},
        )
        self._free = list(range(capacity))

    def request(self, tokens: Tokens) -> int:
        """Leading blocks that were there. Takes the others in as far as room can be made."""
        index = self.index
        index.request(NAMESPACE, tokens)
        ids = index.match(NAMESPACE, tokens)
        here = index.state(COL, ids) == Residency.RESIDENT
        hits = len(ids) if here.all() else int(here.argmin())
        index.touch(COL, ids[:hits])
        index.pin(COL, ids[:hits])
        while (short := len(tokens) - hits - len(self._free)) > 0:
            victims = index.victims(COL, short)
            if not len(victims):
                break
            index.begin_leave(COL, victims)
            self._free += index.finish_leave(COL, victims).tolist()
        taken = min(len(tokens) - hits, len(self._free))
        if taken:
            new = index.insert(NAMESPACE, tokens[: hits + taken])[hits:]
            slots = np.array(self._free[-taken:], np.int32)
            del self._free[-taken:]
            index.begin_fill(COL, new, slots)
            index.finish_fill(COL, new)
        index.unpin(COL, ids[:hits])
        return hits


def run_policy(name: str, requests: Sequence[Tokens], capacity: int, *, look_ahead: int = 0) -> int:
    """Blocks hit by a tier of `capacity` blocks under the policy `name`, one token a block.

    At each request the next `look_ahead` ones are waiting in the queue.
    """
    tier = OneTier(capacity, make_policy(name, capacity, 1))
    waiting = [Waiting(NAMESPACE, blocks) for blocks in requests]
    hits = 0
    for turn, blocks in enumerate(requests, 1):
        tier.index.expect(waiting[turn : turn + look_ahead])
        hits += tier.request(blocks) if len(blocks) else 0
    return hits
