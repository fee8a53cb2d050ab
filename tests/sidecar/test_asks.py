"""What a sidecar learns from: every request once, whatever it finds and however it is served."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import cast

import pytest

from kvtier.index.admission import Admission, Marks, marks_of
from kvtier.index.ghosts import fingerprints
from kvtier.index.shadows import Shadows
from kvtier.index.words import ROOT_KEY, TierId
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import FAILED, Fetch, Signal
from kvtier.tiers.device import CpuDevice
from kvtier.tiers.mover import Mover
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.backend import Backend
from kvtier.tiers.sidecar.jobs import Fetching, Link
from kvtier.tiers.sidecar.session import Session
from tests.sidecar.conftest import Join, StartSidecar
from tests.sidecar.rig import LAYOUT, NAMESPACE, SIZE, SLOT_BYTES, Sidecar, keys_of, tokens_of
from tests.sidecar.test_tier import compute, hits

OTHER = bytes(32)


class Ears:
    """What policy and admission of one sidecar were told."""

    def __init__(self) -> None:
        self.policy: list[bytes] = []
        self.admission: list[list[int]] = []


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    heard = Ears()

    class Listening(Admission):
        def asked(self, marks: Marks) -> None:
            super().asked(marks)
            heard.admission.append(marks.tolist())

    told = Shadows.requested

    def requested(shadows: Shadows, marks: bytes) -> None:
        heard.policy.append(marks)
        told(shadows, marks)

    monkeypatch.setattr("kvtier.tiers.sidecar.backend.Admission", Listening)
    monkeypatch.setattr(Shadows, "requested", requested)
    return heard


class Desk:
    """The server's side of one client, on a loop of its own; no socket, no process."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._replies: dict[int, asyncio.Future[wire.Reply]] = {}
        self._next_id = 0
        self.session, self._backend = self._loop.run_until_complete(self._open(directory))

    async def _open(self, directory: Path) -> tuple[Session, Backend]:
        backend = Backend(
            directory / "store",
            dram_bytes=16 * SLOT_BYTES,
            nvme_bytes=64 * LAYOUT.nbytes,
            after_news=lambda: None,
            dram_policy="adaptive",
            nvme_admission="learned",
        )
        slab = await backend.slab_for(wire.WireLayout.of(LAYOUT))
        return Session(backend, slab, self._send, max_blocks=8), backend

    def _send(self, reply: wire.Reply) -> None:
        owed = self._replies.get(reply.id)
        if owed is not None and not owed.done():
            owed.set_result(reply)

    def ask(self, request: wire.Request) -> wire.Reply:
        """The first reply."""

        async def answered() -> wire.Reply:
            owed: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
            self._replies[request.id] = owed
            self.session.handle(request)
            return await owed

        return self._loop.run_until_complete(answered())

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def lookup(self, num_blocks: int, *, asks: bool, namespace: bytes = NAMESPACE) -> wire.Reply:
        path = wire.ints_to_bytes(tokens_of(num_blocks))
        return self.ask(wire.Lookup(self.new_id(), namespace, path, asks))

    def acquire(self, num_blocks: int) -> None:
        lease = self.new_id()
        self.ask(wire.Acquire(lease, NAMESPACE, wire.ints_to_bytes(tokens_of(num_blocks)), 0))
        self.ask(wire.Release(self.new_id(), lease))

    def fill(self, num_blocks: int, namespace: bytes = NAMESPACE) -> None:
        """Put the first blocks of the path, as an engine does that has computed them."""
        slab = self._backend.slab
        assert slab is not None
        slots = slab.cache.reserve(num_blocks)
        sums = slab.dram.checksums(slots)
        assert slab.cache.adopt(namespace, tokens_of(num_blocks), 0, slots, sums) == num_blocks

    def close(self) -> None:
        self.session.free()
        self._loop.run_until_complete(self._backend.close(0.0))
        self._loop.close()


@pytest.fixture
def desk(tmp_path: Path, ears: Ears) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    try:
        yield desk
    finally:
        desk.close()


def marks(num_blocks: int, namespace: bytes = NAMESPACE) -> list[int]:
    return [int(mark) for mark in marks_of(keys_of(tokens_of(num_blocks), namespace))]


@pytest.mark.parametrize("held", [0, 2, 5])
def test_a_request_is_told_of_once_with_all_it_asked_for_whatever_is_here(
    desk: Desk, ears: Ears, held: int
) -> None:
    desk.fill(held)
    assert desk.lookup(5, asks=True) == wire.Found(1, held * SIZE, 0)
    desk.acquire(held)
    desk.acquire(5)
    assert ears.policy == [fingerprints(NAMESPACE, tokens_of(5), SIZE)]
    assert ears.admission == [marks(5)]


def test_a_lookup_that_does_not_ask_and_an_acquire_tell_nobody(desk: Desk, ears: Ears) -> None:
    desk.fill(3)
    for num_blocks in (3, 5):
        desk.lookup(num_blocks, asks=False)
        desk.acquire(num_blocks)
    assert not ears.policy and not ears.admission


def test_who_asks_twice_is_told_of_twice_and_each_rank_of_its_own_blocks(
    desk: Desk, ears: Ears
) -> None:
    for namespace in (NAMESPACE, NAMESPACE, OTHER):
        desk.lookup(4, asks=True, namespace=namespace)
    assert ears.admission == [marks(4), marks(4), marks(4, OTHER)]
    assert len(ears.policy) == 3 and ears.policy[0] != ears.policy[2]


def test_asking_counts_as_use(desk: Desk) -> None:
    desk.fill(6)
    desk.fill(8, OTHER)
    desk.lookup(6, asks=True)
    assert isinstance(desk.ask(wire.Reserve(desk.new_id(), 7, 60_000)), wire.Reserved)
    kept = [desk.lookup(8, asks=False, namespace=namespace) for namespace in (NAMESPACE, OTHER)]
    assert [found.dram // SIZE for found in kept if isinstance(found, wire.Found)] == [6, 3]


def test_a_fetch_that_was_called_off_gives_its_lease_back() -> None:
    link, signal = Recorder(), Signal()
    device = CpuDevice(signal)
    tokens = tokens_of(4)
    pool = ArrayPool(TierId.HBM, 4, LAYOUT.nbytes)
    request = Fetch(
        NAMESPACE, ROOT_KEY, tokens, tuple(keys_of(tokens)), tokens[:0], pool, pool.alloc(4)
    )
    job = Fetching(cast(Link, link), request, Mover(device), signal)
    job.start()
    assert not job.advance() and not job.flight.done
    job.flight.cancel()
    assert job.advance()
    assert (job.flight.status == FAILED).all() and "nobody wants" in str(job.flight.error)
    assert isinstance(link.sent[0], wire.Acquire)
    assert link.sent[1:] == [wire.Release(2, link.sent[0].id)]
    device.close()


class Recorder:
    """A link whose server never answers."""

    def __init__(self) -> None:
        self.sent: list[wire.Request] = []
        self.client = self
        self._ids = count(1)

    def new_id(self) -> int:
        return next(self._ids)

    def send(self, request: wire.Request, heard: object) -> None:
        self.sent.append(request)

    def tell(self, request: wire.Request) -> None:
        self.sent.append(request)


# ---- through an engine --------------------------------------------------------------------------


def test_each_of_an_engines_requests_asks_once_wherever_its_blocks_are(
    sidecar: Sidecar, join: Join, closing: ExitStack
) -> None:
    engine = join(sidecar)
    cache = TieredCache(SIZE, [engine.hbm], [engine.tier], engine.mover, engine.signal)
    closing.callback(cache.close)
    tokens = tokens_of(6)
    asked = 0

    def heard() -> int:
        """Blocks asked for since the last time, once what is on its way has arrived."""
        nonlocal asked
        assert engine.held(tokens[:SIZE]) in (0, 1)  # answered in order
        before, asked = asked, int(sidecar.numbers()["cache.asked_tokens"]) // SIZE
        return asked - before

    compute(engine, cache, tokens)
    assert heard() == 6
    assert hits(engine, cache, tokens) == {TierId.HBM: 6}
    assert heard() == 6
    ticket = cache.flush(NAMESPACE, tokens)
    assert ticket.wait(None)
    ticket.close()
    assert heard() == 0
    assert cache.shed(TierId.HBM) == 6
    assert hits(engine, cache, tokens) == {TierId.DRAM: 6}  # by hints alone: no lookup is needed
    assert heard() == 6


def test_a_document_that_was_refused_is_written_once_it_is_asked_for_again(
    sidecar_with: StartSidecar, join: Join
) -> None:
    nvme_bytes = 64 * LAYOUT.nbytes
    sidecar = sidecar_with(num_slots=16, nvme_bytes=nvme_bytes, nvme_admission="learned")
    engine = join(sidecar)

    def ask(seed: int) -> int:
        """One request for a document; how much of it was there."""
        tokens = tokens_of(4, seed)
        answer = engine.answer(engine.tier.lookup(NAMESPACE, keys_of(tokens), tokens, asks=True))
        if answer < 4:
            assert engine.put(tokens, answer).status.all()
        return answer

    def written_by(*seeds: int) -> int:
        """Blocks sent to the store while so many documents pass."""
        before = sidecar.numbers()["cache.sieve.admitted"]
        for seed in seeds:
            ask(seed)
        return int(sidecar.numbers()["cache.sieve.admitted"] - before)

    written_by(*range(1, 200))
    assert written_by(*range(200, 208)) == 0, "none of them ever came back"
    assert ask(200) == 0, "it was refused, and has left DRAM"
    written_by(*range(208, 216))
    assert ask(200) == 4
