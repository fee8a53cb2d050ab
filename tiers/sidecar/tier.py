"""The engine's store beside a sidecar: lookups, fetches and puts over one connection.

A `Store` like any other for the cache: it answers, lands or fails, and raises nothing. A sidecar
that dies, hangs or is restarted is a miss: what was under way fails, lookups answer 0, and a
background thread connects again, with a new slab. Knows the protocol through `client.py` and
`jobs.py`, and no block's meaning.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Protocol

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.index.words import BlockKey, TierId, Tokens
from kvtier.tiers.contracts import LANDED, Answer, Fetch, Flight, Put, Signal
from kvtier.tiers.errors import SidecarUnavailable
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import SidecarClient
from kvtier.tiers.sidecar.jobs import Fetching, Job, Link, Putting, SidecarFailed

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""After this long without an answer a request counts as failed (a hang shows much earlier)."""
PERSIST_DEADLINES = 20
"""Deadlines that a persist may take: it writes whole documents down, for offline work."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
# The tier's thread looks again at least this often, in case a signal's owner died.
_TICK_S = 0.5
_CLOSE_S = 5.0


@dataclass(frozen=True)
class SidecarTierStatistics:
    connected: bool
    connections: int
    """Hellos that succeeded: 1, and one more for each reconnection."""
    jobs: int
    fetched_blocks: int
    stored_blocks: int
    failed_blocks: int


class Registrar(Protocol):
    """Makes host memory fit for a GPU's copy engine."""

    def register(self, pool: ArrayPool) -> None: ...
    def forget(self, pool: ArrayPool) -> None: ...


class SidecarTier:
    """Made by `connect`. A `Store`. `signal` is the one that the mover's device notifies."""

    def __init__(
        self,
        socket_path: Path,
        layout: BlockLayout,
        *,
        mover: Mover,
        signal: Signal,
        client_name: str,
        deadline_s: float,
        registrar: Registrar | None,
    ) -> None:
        self.tier = TierId.SIDECAR
        self._socket_path = socket_path
        self._layout = layout
        self._mover = mover
        self._signal = signal
        self._client_name = client_name
        self._deadline_s = deadline_s
        self._registrar = registrar
        self._lock = Lock()
        self._link: Link | None = None
        self._connections = 0
        self._blocks = {"fetched": 0, "stored": 0, "failed": 0}
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: list[Job] = []
        self._ended_links: list[Link] = []
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvtier-sidecar-tier", daemon=True)

    @classmethod
    def connect(
        cls,
        socket_path: Path,
        layout: BlockLayout,
        *,
        mover: Mover,
        signal: Signal,
        client_name: str = "engine",
        deadline_s: float = DEADLINE_S,
        registrar: Registrar | None = None,
    ) -> "SidecarTier":
        """Connect to a running sidecar; later losses of it are repaired in the background.

        `registrar` (a `CudaDevice`) hears of each slab before its first use and after its last.
        Raises `SidecarUnavailable`.
        """
        tier = cls(
            socket_path,
            layout,
            mover=mover,
            signal=signal,
            client_name=client_name,
            deadline_s=deadline_s,
            registrar=registrar,
        )
        tier._join()
        tier._thread.start()
        return tier

    # ---- the store's face -------------------------------------------------------------------

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        tokens: Tokens,
        *,
        asks: bool = False,
    ) -> Answer:
        def blocks(reply: wire.Reply | None) -> int:
            if not isinstance(reply, wire.Found):
                return 0
            return (reply.dram + reply.nvme) // self._layout.block_size

        return self._ask(
            lambda n: wire.Lookup(n, namespace, wire.ints_to_bytes(tokens), asks),
            blocks,
            keys,
            tokens,
            self._deadline_s,
            needed=bool(keys) or asks,
        )

    def persist(self, namespace: bytes, keys: Sequence[BlockKey], tokens: Tokens) -> Answer:
        def blocks(reply: wire.Reply | None) -> int:
            return reply.blocks if isinstance(reply, wire.Flushed) else 0

        return self._ask(
            lambda n: wire.Flush(n, namespace, wire.ints_to_bytes(tokens)),
            blocks,
            keys,
            tokens,
            self._deadline_s * PERSIST_DEADLINES,
            needed=bool(keys),
        )

    def fetch(self, request: Fetch) -> Flight:
        link = self._usable(len(request.prefix) + len(request.tokens))
        if link is None or not request.keys:
            return self._failed(len(request.keys))
        return self._launch(Fetching(link, request, self._mover, self._signal))

    def put(self, request: Put) -> Flight:
        link = self._usable(len(request.prefix) + len(request.tokens))
        if link is None or not request.keys:
            return self._failed(len(request.keys))
        return self._launch(Putting(link, request, self._mover, self._signal))

    def close(self) -> None:
        """End jobs as soon as their copies are over, then the connection. Idempotent."""
        self._closing.set()
        self._post(self._cut_jobs)
        self._thread.join()

    def statistics(self) -> SidecarTierStatistics:
        with self._lock:
            return SidecarTierStatistics(
                connected=self._link is not None,
                connections=self._connections,
                jobs=len(self._jobs),
                fetched_blocks=self._blocks["fetched"],
                stored_blocks=self._blocks["stored"],
                failed_blocks=self._blocks["failed"],
            )

    # ---- on the caller's thread -------------------------------------------------------------

    def _ask(
        self,
        request: Callable[[int], wire.Request],
        blocks: Callable[[wire.Reply | None], int],
        keys: Sequence[BlockKey],
        tokens: Tokens,
        timeout_s: float,
        *,
        needed: bool,
    ) -> Answer:
        """How many leading `keys` the answer to `request` counts; `blocks` counts from the root.
        Nothing is sent unless that is `needed`."""
        answer = Answer(self._signal)
        link = self._usable(len(tokens)) if needed else None
        if link is None:
            answer.give(0)
            return answer
        before = len(tokens) // self._layout.block_size - len(keys)

        def heard(reply: wire.Reply | None) -> None:
            answer.give(min(len(keys), max(0, blocks(reply) - before)))

        client = link.client
        client.send(request(client.new_id()), heard, timeout_s=timeout_s)
        return answer

    def _usable(self, num_tokens: int) -> Link | None:
        """The connection, if its server answers and a path of this length may travel on it."""
        with self._lock:
            link = self._link
        if link is None or link.client.silent or self._closing.is_set():
            return None
        return link if num_tokens <= wire.MAX_TOKENS else None

    def _failed(self, num_blocks: int) -> Flight:
        flight = Flight(num_blocks, self._signal)
        flight.fail_rest(SidecarFailed("no sidecar is connected"))
        return flight

    def _launch(self, job: Job) -> Flight:
        self._post(lambda: self._begin(job))
        return job.flight

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._signal.notify()

    # ---- on the tier's thread ---------------------------------------------------------------

    def _run(self) -> None:
        close_by: float | None = None
        while True:
            ticks = self._signal.ticks
            while self._inbox:
                self._inbox.popleft()()
            self._advance()
            if self._closing.is_set():
                close_by = close_by or time.monotonic() + _CLOSE_S
                if not self._jobs or time.monotonic() > close_by:
                    break
            self._signal.wait(ticks, _TICK_S)
        self._part()

    def _begin(self, job: Job) -> None:
        self._jobs.append(job)
        if self._closing.is_set():
            job.flight.fail_rest(SidecarFailed("the tier was closed"))
            job.cut()
        else:
            job.start()

    def _advance(self) -> None:
        going: list[Job] = []
        for job in self._jobs:
            try:
                over = job.advance()
            except Exception as error:
                log.exception("sidecar: a job broke; its blocks fail")
                job.flight.fail_rest(error)
                over = True
            if over:
                self._count(job)
            else:
                going.append(job)
        self._jobs = going
        in_use = {id(job.link) for job in going}
        for link in [link for link in self._ended_links if id(link) not in in_use]:
            self._ended_links.remove(link)
            self._unmap(link)

    def _unmap(self, link: Link) -> None:
        if self._registrar is not None:
            self._registrar.forget(link.slab)
        link.slab.close()

    def _count(self, job: Job) -> None:
        landed = int((job.flight.status == LANDED).sum())
        with self._lock:
            self._blocks["fetched" if isinstance(job, Fetching) else "stored"] += landed
            self._blocks["failed"] += len(job.flight) - landed

    def _cut_jobs(self) -> None:
        for job in self._jobs:
            job.cut()

    def _part(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.client.close()
            self._ended_links.append(link)
        while self._inbox:
            self._inbox.popleft()()
        self._advance()
        for job in self._jobs:
            job.flight.fail_rest(SidecarFailed("the tier was closed"))

    # ---- the connection ---------------------------------------------------------------------

    def _join(self) -> None:
        """Connect and take the new connection into use. Raises `SidecarUnavailable`."""
        client = SidecarClient.connect(
            self._socket_path,
            self._layout,
            client_name=self._client_name,
            on_end=lambda: self._post(self._look_for_end),
        )
        slab = client.slab
        try:
            if slab is None:
                raise SidecarUnavailable(f"sidecar at {self._socket_path}: gave no slab")
            if self._registrar is not None:
                self._registrar.register(slab)
        except KvtierError as error:
            client.close()
            raise SidecarUnavailable(f"sidecar at {self._socket_path}: {error}") from error
        link = Link(client, slab, self._deadline_s, self._post)
        with self._lock:
            wanted = not self._closing.is_set()
            if wanted:
                self._link = link
                self._connections += 1
        if wanted:
            self._post(self._look_for_end)
        else:
            client.close()
            self._unmap(link)

    def _look_for_end(self) -> None:
        """If the connection is over, put it aside and begin to connect again."""
        with self._lock:
            link = self._link
            if link is None or not link.client.ended:
                return
            self._link = None
        self._ended_links.append(link)
        if not self._closing.is_set():
            log.warning("sidecar at %s is gone; serving without it", self._socket_path)
            Thread(target=self._rejoin, name="kvtier-sidecar-connect", daemon=True).start()

    def _rejoin(self) -> None:
        delay_s = FIRST_RETRY_S
        while not self._closing.wait(delay_s):
            try:
                self._join()
            except SidecarUnavailable as error:
                log.debug("%s", error)
                delay_s = min(2 * delay_s, LAST_RETRY_S)
            else:
                return
