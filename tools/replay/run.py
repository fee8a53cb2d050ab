"""Drive the cache through a trace, request by request, and count what it did.

A request acquires, waits for what comes up from below, computes the rest and commits, before the
next one begins. It releases when as many later ones have begun as run at once, or when one of them
needs its room. Blocks that the output adds count when a later request names them. Knows no files
and prints nothing.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.index.admission import Admission
from kvtier.index.lookahead import Waiting
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.lease import Lease
from kvtier.tools.replay.one_tier import NAMESPACE
from kvtier.tools.replay.world import Setup, World

# Far more than any request waits: nothing in this world takes time.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a replay did, in blocks. Hits are counted by the tier a block was found in."""

    requests: int
    asked: int
    hits: Mapping[TierId, int]
    truncated: int
    """Blocks at the end of requests that are longer than the top tier: never taken in."""
    moved: Mapping[str, int]
    """Blocks copied, by way: "hbm > dram"."""
    written_back: int
    """Of what went to the store: in the background."""
    evicted: Mapping[TierId, int]
    dropped: int
    """Of those evicted from pools: no tier below had a copy."""
    resident: Mapping[TierId, int]
    """At the end."""


class Replay:
    """One pass of requests through a world, in order of time; at most `running` hold a lease."""

    def __init__(
        self, setup: Setup, running: int = 1, *, admission: Admission | None = None
    ) -> None:
        """`admission`: see `World`."""
        self.world = World(setup, admission=admission)
        self._most = running
        self._running: deque[Lease] = deque()
        self._hits: Counter[TierId] = Counter()
        self._requests = 0
        self._asked = 0
        self._truncated = 0

    def request(
        self, moment_s: float, blocks: Tokens, waiting: Sequence[Tokens] = ()
    ) -> list[TierId]:
        """Serve one request for these chained block ids; the tier each block was found in.

        `waiting`: what those behind it in the queue will ask for, the next one first.
        """
        cache, room = self.world.cache, self.world.pools[0].num_slots
        self._pass_time(moment_s)
        cache.expect([Waiting(NAMESPACE, tokens) for tokens in waiting])
        wanted = blocks[:room]
        while self._running and not cache.has_room(len(wanted)):
            cache.release(self._running.popleft())
        lease = cache.acquire(NAMESPACE, blocks, limit=room)
        lease.ticket.wait(cache.clock() + PATIENCE_S)
        lease.ticket.settle()
        sources = lease.sources
        cache.extend(lease, len(wanted) - len(sources), deadline=cache.clock() + PATIENCE_S)
        cache.commit(lease, wanted)
        self._running.append(lease)
        while len(self._running) >= self._most:
            cache.release(self._running.popleft())
        cache.drain(cache.clock() + PATIENCE_S)
        self._requests += 1
        self._asked += len(blocks)
        self._truncated += len(blocks) - len(wanted)
        self._hits.update(sources)
        return sources

    def outcome(self) -> Outcome:
        """The counts so far."""
        world, statistics = self.world, self.world.cache.statistics()
        copies, store, names = world.mover.statistics(), world.store, [p.tier for p in world.pools]
        moved: dict[str, int] = {}
        if len(names) > 1:
            moved[f"{names[0]} > {names[1]}"] = copies.demoted_blocks
            moved[f"{names[1]} > {names[0]}"] = copies.promoted_blocks
        evicted = dict(statistics.evicted)
        resident = {pool.tier: pool.resident for pool in statistics.pools}
        if store is not None:
            moved[f"{names[-1]} > {store.tier}"] = store.num_written
            moved[f"{store.tier} > {names[-1]}"] = store.num_fetched
            evicted[store.tier] = store.num_evicted
            resident[store.tier] = len(store)
        return Outcome(
            requests=self._requests,
            asked=self._asked,
            hits={tier: self._hits[tier] for tier in resident},
            truncated=self._truncated,
            moved=moved,
            written_back=0 if store is None else store.num_written_back,
            evicted=evicted,
            dropped=statistics.dropped,
            resident=resident,
        )

    def _pass_time(self, moment_s: float) -> None:
        """Do what falls due until then, as an engine's ticker does."""
        cache, time = self.world.cache, self.world.time
        while (due := cache.next_due()) is not None and due < moment_s:
            time.reach(due)
            cache.poll()
        time.reach(moment_s)
