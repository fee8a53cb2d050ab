"""Which requests compute what in the next launch: continuous batching with chunked prefill.

Owns the queue and every lease. Decoding rows go first, then prompts in order of arrival, in chunks
under one token budget. A request is admitted in order of arrival, when there is budget and room for
it, and not while another is about to make blocks that it could use: of several with one document,
the first loads or computes it. A request whose prefix is on its way up is LOADING and holds back
none but those. Where tokens are cut into launches, and which of them are shared, its `Cuts` say.
Knows no model.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

import numpy as np

from kvtier.engine.cuts import ChunkCuts, Cuts, FreeCuts
from kvtier.engine.errors import BadSettings
from kvtier.engine.request import Request, State
from kvtier.index.lookahead import Waiting
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.errors import TierFull
from kvtier.tiers.lease import Lease, Ticket


@dataclass(frozen=True)
class EngineSettings:
    """step_tokens: rows of one launch at most, and twice that while nobody waits for a next token.
    A short launch keeps the others' tokens coming, a long one is cheaper (on a CPU, prefill of 4k
    tokens takes 4 % less in chunks of 1024 than of 512, and 10 % more in chunks of 384).
    max_running: requests that hold leases at once.

    prefetch_depth: waiting requests whose blocks are brought up to DRAM meanwhile.
    lookahead: waiting requests whose blocks, wherever they are, leave after all others.
    load_deadline_s: how long a request waits for blocks that the cache has promised, and for slots
    that it is vacating.
    reuse: False computes everything and shares nothing (a baseline).
    exact: a prompt leads to the same bits whatever of it was found in the cache, and whoever runs
    beside it. Prompts are computed in chunks of `exact_chunk` tokens (a multiple of the block size)
    that begin at its multiples; only whole chunks of prompts are shared, and decoding always takes
    `max_running` rows.
    Raises `BadSettings` if a value is outside its range.
    """

    step_tokens: int = 512
    max_running: int = 16
    prefetch_depth: int = 4
    lookahead: int = 64
    load_deadline_s: float = 5.0
    reuse: bool = True
    exact: bool = False
    exact_chunk: int = 256

    def __post_init__(self) -> None:
        leasts = {"step_tokens": 1, "max_running": 1, "exact_chunk": 1}
        leasts |= dict.fromkeys(("prefetch_depth", "lookahead", "load_deadline_s"), 0)
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise BadSettings(
                    f"engine.{name}: {getattr(self, name)} given, want {least} or more"
                )
        if self.step_tokens < self.max_running:
            raise BadSettings(
                f"engine.step_tokens: {self.step_tokens} leaves no row for each of "
                f"{self.max_running} running requests; raise it"
            )
        if self.exact and self.step_tokens < self.exact_chunk + self.max_running:
            raise BadSettings(
                f"engine.step_tokens: {self.step_tokens} leaves no room for a chunk of "
                f"{self.exact_chunk} beside {self.max_running} running requests; raise it to "
                f"{self.exact_chunk + self.max_running}, or lower engine.exact_chunk"
            )

    def cuts(self, block_size: int) -> Cuts:
        """Where tokens are cut. Raises `BadSettings` if chunks are no whole blocks."""
        if not self.exact:
            return FreeCuts(block_size)
        if self.exact_chunk % block_size:
            raise BadSettings(
                f"engine.exact_chunk: {self.exact_chunk} is no multiple of the block size; "
                f"give one of {block_size}"
            )
        return ChunkCuts(self.exact_chunk)


@dataclass(frozen=True, eq=False)
class Work:
    """One request's part of a launch: its tokens `start` to `start + count - 1`."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_past_prompt(self) -> bool:
        """Whether these tokens were generated (at least the first of them)."""
        return self.start >= len(self.request.prompt)

    @property
    def wants_logits(self) -> bool:
        return self.request.sampler is not None and self.end == len(self.request.tokens)


class Scheduler:
    """Not thread-safe. `dropped` is told the id of a request whose blocks are gone."""

    def __init__(
        self,
        cache: TieredCache,
        block_size: int,
        settings: EngineSettings,
        clock: Callable[[], float],
        dropped: Callable[[int], None],
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        self._settings = settings
        self._cuts = settings.cuts(block_size)
        self._clock = clock
        self._dropped = dropped
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # LOADING and RUNNING, oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def loading(self) -> list[Request]:
        """Active requests whose blocks are still arriving."""
        return [each for each in self._active if each.state is State.LOADING]

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._active

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        if len(self._waiting) <= self._settings.lookahead:
            self._look_ahead()

    def plan(self) -> list[Work]:
        """The next launch; empty if everything waits for the cache (or nothing is left).

        Takes the slots that the launch writes. Raises `TierFull` if a request that runs alone
        cannot get them within the load deadline.
        """
        self._cache.poll()
        self._end_loads()
        urgent, work = self._by_urgency(), list[Work]()
        budget = self._settings.step_tokens
        if not any(self._cuts.is_decoding(each) for each in urgent):
            budget *= 2
        for request in urgent:
            budget -= self._take(request, budget, work)
        for request in list(self._waiting):
            if budget < self._cuts.least or len(self._active) >= self._settings.max_running:
                break
            if not self._fits(request):
                break
            if any(self._computes_for(each, request) for each in self._active):
                continue
            self._waiting.remove(request)
            self._admit(request)
            self._look_ahead()
            budget -= self._take(request, budget, work)
        self._prefetch()
        return work

    def advance(self, work: Iterable[Work]) -> None:
        """These launches have run: their tokens' K and V stand in the pool. Shares what may be."""
        for each in work:
            request = each.request
            before, request.computed = request.computed, each.end
            shared = self._cuts.shared(request, request.computed)
            if self._settings.reuse and shared > self._cuts.shared(request, before):
                self._cache.commit(_lease(request), request.tokens[:shared])
            if request.sampler is None and not request.pending:
                self.finish(request, "prefilled")

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is; its blocks stay in the cache. Idempotent."""
        if request.state is State.FINISHED:
            return
        self._let_go(request)
        if request in self._active:
            self._active.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._look_ahead()
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished_at = self._clock()

    def patience(self) -> float:
        """Seconds until something must be looked at again even if the cache stays silent."""
        now = self._clock()
        return max(0.0, min([0.05, *(each.load_until - now for each in self.loading)]))

    def _end_loads(self) -> None:
        for request in self.loading:
            lease = _lease(request)
            if not lease.ticket.done():
                if self._clock() < request.load_until:
                    continue
                lease.ticket.settle()
            self._start(request, lease)

    def _start(self, request: Request, lease: Lease) -> None:
        usable = self._cuts.shared(request, lease.cached_tokens)
        if usable < lease.cached_tokens:
            # The hit ended within a chunk, which is computed whole, into slots of its own.
            self._acquire(request, usable, lease.ticket)
            self._cache.release(lease, again=True)
            return
        request.state = State.RUNNING
        request.computed = lease.cached_tokens
        if request.cached_tokens is None:
            request.cached_tokens = lease.cached_tokens
            request.hit_tokens = dict(lease.hit_tokens)
        if not request.pending:
            self.finish(request, "prefilled")

    def _by_urgency(self) -> Sequence[Request]:
        running = [each for each in self._active if each.state is State.RUNNING]
        return sorted(running, key=lambda each: not self._cuts.is_decoding(each))

    def _take(self, request: Request, budget: int, work: list[Work]) -> int:
        """Plan as many of the request's tokens as fit; returns the rows they take."""
        if request.state is not State.RUNNING:
            return 0
        count, rows = self._cuts.next(request, budget)
        if count < 1:
            return 0
        has_room = self._make_room(request, request.computed + count)
        # Whom it preempted may be admitted again for this very launch: what was planned is void.
        work[:] = [each for each in work if each.request.state is State.RUNNING]
        if not has_room:
            return 0
        work.append(Work(request, request.computed, count))
        return rows

    def _make_room(self, request: Request, end: int) -> bool:
        """Slots for positions up to `end`, preempting younger requests if need be."""
        lease = _lease(request)
        need = self._blocks(end) - len(lease.block_table)
        if need <= 0:
            return True
        while True:
            try:
                self._cache.extend(lease, need)
                request.stalled_at = None
                return True
            except TierFull:
                if self._cache.has_room(need) and not self._stalled_too_long(request):
                    return False  # slots are being vacated: another step will find them
            youngest = self._active[-1]
            if youngest is request:
                break
            self._preempt(youngest)
        if len(self._active) > 1:
            return False
        self._cache.extend(lease, need, deadline=self._clock() + self._settings.load_deadline_s)
        return True

    def _stalled_too_long(self, request: Request) -> bool:
        """Whether it has waited for slots to be vacated (by a store that hangs?) long enough."""
        now = self._clock()
        if request.stalled_at is None:
            request.stalled_at = now
        return now - request.stalled_at >= self._settings.load_deadline_s

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue. Whole blocks stay in the cache, the tail is lost."""
        self._let_go(request, again=True)
        self._active.remove(request)
        request.state = State.WAITING
        request.computed = 0
        self._waiting.appendleft(request)
        self._look_ahead()

    def _fits(self, request: Request) -> bool:
        """Whether its prompt fits beside what the active ones have still to take.

        The first one always fits: the engine refuses what is larger than the pool.
        """
        owed = sum(
            max(0, self._blocks(len(each.tokens) + 1) - len(_lease(each).block_table))
            for each in self._active
        )
        return not self._active or self._cache.has_room(
            owed + self._blocks(len(request.tokens) + 1)
        )

    def _computes_for(self, active: Request, waiting: Request) -> bool:
        """Whether `active` is about to make blocks that `waiting` would then find in the cache."""
        if not self._settings.reuse or active.namespace != waiting.namespace:
            return False
        theirs, ours = active.tokens, waiting.tokens[: waiting.cache_limit]
        n = min(len(theirs), len(ours))
        differ = np.flatnonzero(theirs[:n] != ours[:n])
        common = int(differ[0]) if len(differ) else n
        common = min(self._cuts.shared(active, common), self._cuts.shared(waiting, common))
        return common > self._cuts.shared(active, active.computed)

    def _admit(self, request: Request) -> None:
        request.load_until = self._clock() + self._settings.load_deadline_s
        request.state = State.LOADING
        self._active.append(request)
        self._active.sort(key=lambda each: each.id)
        prefetched, request.prefetch = request.prefetch, None
        self._acquire(request, self._findable(request), prefetched)

    def _acquire(self, request: Request, limit: int, found: Ticket | None) -> None:
        """Lease `limit` cached tokens at most; `found` is what an earlier look has led to."""
        request.lease = self._cache.acquire(
            request.namespace,
            request.tokens,
            limit=limit if self._settings.reuse else 0,
            prefetched=found,
            deadline=request.load_until,
            again=request.asked,
        )
        request.asked = True
        if request.lease.ticket.done():
            self._start(request, request.lease)

    def _findable(self, request: Request) -> int:
        """Tokens that the cache may supply."""
        return self._cuts.shared(request, request.cache_limit)

    def _look_ahead(self) -> None:
        """Tell the cache who is next, so that what they will find stays until they come.

        Whenever the queue changes, or a lease that held blocks they may find has ended.
        """
        if self._settings.reuse and self._settings.lookahead:
            first = islice(self._waiting, self._settings.lookahead)
            self._cache.expect([Waiting(r.namespace, r.tokens[: self._findable(r)]) for r in first])

    def _prefetch(self) -> None:
        if not self._settings.reuse:
            return
        for position, request in enumerate(self._waiting):
            if position >= self._settings.prefetch_depth:
                break
            if request.prefetch is None:
                ticket = self._cache.prefetch(
                    request.namespace, request.tokens, limit=self._findable(request)
                )
                request.prefetch = None if ticket.is_idle else ticket

    def _let_go(self, request: Request, *, again: bool = False) -> None:
        if request.prefetch is not None:
            request.prefetch.close()
            request.prefetch = None
        if request.lease is not None:
            self._cache.release(request.lease, again=again)
            request.lease = None
            self._dropped(request.id)

    def _blocks(self, tokens: int) -> int:
        return ceil(tokens / self._block_size)


def _lease(request: Request) -> Lease:
    """The lease of an active request."""
    assert request.lease is not None, f"request {request.id} is {request.state} without a lease"
    return request.lease
