"""The engine's side: the right bytes from the tier they were in, and never worse than a miss."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvtier.index.errors import KvtierError
from kvtier.index.words import ROOT_KEY, TierId, Tokens
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.contracts import FAILED, LANDED, Put
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import SidecarClient
from kvtier.tiers.sidecar.tier import SidecarTier
from tests.prf import block_bytes
from tests.sidecar.conftest import Join, Speak, StartSidecar
from tests.sidecar.rig import (
    LAYOUT,
    NAMESPACE,
    PATIENCE_S,
    SIZE,
    Engine,
    Sidecar,
    keys_of,
    tokens_of,
    wait_for,
)


def test_what_one_engine_puts_another_fetches_byte_for_byte(shared: Sidecar, join: Join) -> None:
    writer, reader = join(shared), join(shared)
    tokens = tokens_of(21)
    put = writer.put(tokens)
    assert (put.status == LANDED).all() and put.error is None
    assert reader.held(tokens) == 21
    flight, right = reader.fetch(tokens)
    assert right == [True] * 21
    assert flight.sources == [TierId.DRAM] * 21
    assert shared.numbers()["sidecar.held_blocks"] == 0


@pytest.mark.parametrize("first", [1, 5, 8])
def test_blocks_behind_those_the_engine_has_are_put_and_fetched_alone(
    shared: Sidecar, join: Join, first: int
) -> None:
    engine = join(shared)
    tokens = tokens_of(9, seed=first)
    assert (engine.put(tokens[: first * SIZE]).status == LANDED).all()
    assert (engine.put(tokens, first).status == LANDED).all()
    assert engine.held(tokens, keys_of(tokens)[first:]) == 9 - first
    flight, right = engine.fetch(tokens, first)
    assert right == [True] * (9 - first) and flight.done


def test_blocks_whose_parent_the_sidecar_lacks_are_refused(shared: Sidecar, join: Join) -> None:
    engine = join(shared)
    tokens = tokens_of(5, seed=50)
    before = shared.numbers()["sidecar.num_free"]
    assert (engine.put(tokens, 2).status == FAILED).all()
    assert engine.held(tokens) == 0
    assert shared.numbers()["sidecar.num_free"] == before


def test_a_fetch_lands_what_is_there_and_fails_the_rest(shared: Sidecar, join: Join) -> None:
    engine = join(shared)
    tokens = tokens_of(7, seed=60)
    assert (engine.put(tokens[: 3 * SIZE]).status == LANDED).all()
    flight, right = engine.fetch(tokens)
    assert right == [True] * 3 + [False] * 4
    assert flight.status.tolist() == [LANDED] * 3 + [FAILED] * 4
    assert "no longer holds" in str(flight.error)


def test_another_namespace_finds_nothing(shared: Sidecar, join: Join) -> None:
    engine = join(shared)
    tokens = tokens_of(4, seed=70)
    assert (engine.put(tokens).status == LANDED).all()
    other = bytes(32)
    answer = engine.tier.lookup(other, keys_of(tokens, other), tokens)
    assert engine.answer(answer) == 0
    assert engine.held(tokens) == 4


def test_nothing_asked_is_nothing_answered_at_once(shared: Sidecar, join: Join) -> None:
    engine = join(shared)
    none = tokens_of(0)
    assert engine.held(none) == 0
    assert len(engine.fetch(none)[0]) == 0 and len(engine.put(none)) == 0


def test_a_put_longer_than_the_slab_goes_down_group_by_group(
    sidecar_with: StartSidecar, join: Join
) -> None:
    sidecar = sidecar_with(num_slots=24)
    engine = join(sidecar, num_slots=61)
    tokens = tokens_of(61)
    put = engine.put(tokens)
    assert (put.status == LANDED).all()
    assert engine.held(tokens) == 61
    flight, right = engine.fetch(tokens)
    assert right == [True] * 12 + [False] * 49  # one client holds half of the slab at most
    assert flight.status.tolist() == [LANDED] * 12 + [FAILED] * 49
    sidecar.end(signal.SIGTERM)
    sidecar.num_slots = 130
    sidecar.start()
    engine.wait(lambda: engine.tier.statistics().connected)
    flight, right = engine.fetch(tokens)
    assert right == [True] * 61
    assert set(flight.sources) == {TierId.NVME}


def test_a_restarted_sidecar_serves_from_nvme_what_it_wrote_when_it_stopped(
    sidecar: Sidecar, join: Join
) -> None:
    engine = join(sidecar)
    tokens = tokens_of(11)
    assert (engine.put(tokens).status == LANDED).all()
    assert sidecar.end(signal.SIGTERM)[0] == 0
    sidecar.start()
    engine.wait(lambda: engine.tier.statistics().connected)
    assert engine.held(tokens) == 11
    flight, right = engine.fetch(tokens)
    assert right == [True] * 11
    assert flight.sources == [TierId.NVME] * 11
    again, right = engine.fetch(tokens)
    assert right == [True] * 11
    assert again.sources == [TierId.DRAM] * 11


def test_what_was_persisted_survives_a_kill(sidecar: Sidecar, join: Join) -> None:
    engine = join(sidecar)
    tokens = tokens_of(6)
    keys = keys_of(tokens)
    assert (engine.put(tokens).status == LANDED).all()
    assert engine.answer(engine.tier.persist(NAMESPACE, keys[2:], tokens)) == 4
    sidecar.end(signal.SIGKILL)
    sidecar.start()
    engine.wait(lambda: engine.tier.statistics().connections == 2)
    flight, right = engine.fetch(tokens)
    assert right == [True] * 6
    assert flight.sources == [TierId.NVME] * 6


def test_blocks_are_written_back_while_nobody_says_anything(
    sidecar_with: StartSidecar, join: Join
) -> None:
    """And so survive the sidecar's being killed."""
    sidecar = sidecar_with(writeback_s=0.3)
    join(sidecar).put(tokens_of(9))
    wait_for(lambda: sidecar.numbers()["cache.written_back"] == 9)
    assert sidecar.numbers()["nvme.blocks"] == 9
    sidecar.end(signal.SIGKILL)
    sidecar.start()
    flight, right = join(sidecar).fetch(tokens_of(9))
    assert right == [True] * 9
    assert set(flight.sources) == {TierId.NVME}


def test_without_a_store_nothing_is_persistent(sidecar_with: StartSidecar, join: Join) -> None:
    engine = join(sidecar_with(store=False))
    tokens = tokens_of(3)
    assert (engine.put(tokens).status == LANDED).all()
    assert engine.answer(engine.tier.persist(NAMESPACE, keys_of(tokens), tokens)) == 0
    assert engine.held(tokens) == 3


def test_a_sidecar_killed_under_way_is_a_miss_and_is_found_again(
    sidecar: Sidecar, join: Join
) -> None:
    engine = join(sidecar)
    tokens, later = tokens_of(5), tokens_of(7, seed=1)
    assert (engine.put(tokens).status == LANDED).all()
    sidecar.freeze()
    fetch, fetch_slots = engine.start_fetch(tokens)
    put, put_slots = engine.start_put(later)
    lookup = engine.tier.lookup(NAMESPACE, keys_of(tokens), tokens)
    sidecar.end(signal.SIGKILL)
    engine.wait(lambda: fetch.done and put.done and lookup.done)
    assert (fetch.status == FAILED).all() and (put.status == FAILED).all()
    assert lookup.value == 0
    engine.wait(lambda: not engine.tier.statistics().connected)
    assert engine.held(tokens) == 0
    assert (engine.fetch(tokens)[0].status == FAILED).all()
    engine.hbm.free(fetch_slots)
    engine.hbm.free(put_slots)
    sidecar.start()
    engine.wait(lambda: engine.tier.statistics().connected)
    assert (engine.put(later).status == LANDED).all()
    assert engine.fetch(later)[1] == [True] * 7


def test_a_sidecar_that_hangs_is_found_out_long_before_any_deadline(
    sidecar: Sidecar, join: Join
) -> None:
    engine = join(sidecar)
    tokens = tokens_of(4)
    assert (engine.put(tokens).status == LANDED).all()
    sidecar.freeze()
    started = time.monotonic()
    assert engine.held(tokens) == 0
    assert time.monotonic() - started < PATIENCE_S / 2
    # From then on nobody waits for it at all.
    assert engine.tier.lookup(NAMESPACE, keys_of(tokens), tokens).value == 0
    assert engine.start_fetch(tokens)[0].done
    sidecar.thaw()
    engine.wait(lambda: engine.held(tokens) == 4)
    assert engine.fetch(tokens)[1] == [True] * 4
    assert engine.tier.statistics().connections == 1


def test_a_long_answer_of_a_healthy_sidecar_is_waited_for(
    sidecar_with: StartSidecar, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=2)
    assert isinstance(speak(sidecar).reserve(1), wire.Reserved)
    assert isinstance(speak(sidecar).reserve(1), wire.Reserved)
    client = SidecarClient.connect(sidecar.socket, LAYOUT, client_name="patient")
    assert client.slab is not None
    with pytest.raises(KvtierError, match="no room"):
        client.call(wire.Reserve(client.new_id(), 1, 2000), timeout_s=PATIENCE_S)
    client.close()
    client.slab.close()


def test_a_sidecar_that_hangs_is_a_miss_by_the_deadline_and_no_slot_is_lost(
    sidecar: Sidecar, join: Join
) -> None:
    engine = join(sidecar, deadline_s=0.3)
    tokens, later = tokens_of(4), tokens_of(3, seed=1)
    engine.wait(lambda: (engine.put(tokens).status == LANDED).all())
    sidecar.freeze()
    started = time.monotonic()
    fetch, fetch_slots = engine.start_fetch(tokens)
    put, put_slots = engine.start_put(later)
    assert engine.held(tokens) == 0
    engine.wait(lambda: fetch.done and put.done)
    assert time.monotonic() - started < 10
    assert (fetch.status == FAILED).all() and (put.status == FAILED).all()
    sidecar.thaw()
    # What the server grants late, nobody wants any more: it comes back by itself.
    numbers = {"sidecar.held_blocks": -1}

    def settled() -> bool:
        numbers.update(sidecar.numbers())  # type: ignore[arg-type]
        return numbers["sidecar.held_blocks"] == 0

    wait_for(settled)
    assert numbers["sidecar.num_free"] == numbers["sidecar.num_slots"] - 4
    engine.hbm.free(fetch_slots)
    engine.hbm.free(put_slots)
    engine.wait(lambda: engine.fetch(tokens)[1] == [True] * 4)


def test_blocks_that_no_longer_match_their_checksum_are_not_offered(
    shared: Sidecar, join: Join
) -> None:
    engine = join(shared)
    tokens = tokens_of(3, seed=80)
    keys = keys_of(tokens)
    slots = engine.hbm.alloc(3)
    for slot, key in zip(slots.tolist(), keys, strict=True):
        engine.hbm.view(slot)[:] = block_bytes(key, LAYOUT.nbytes)
    sums = np.array([xxh3_64_intdigest(engine.hbm.view(s).data) for s in slots], np.uint64)
    engine.hbm.view(int(slots[1]))[7] ^= 1
    flight = engine.tier.put(
        Put(NAMESPACE, ROOT_KEY, tokens, tuple(keys), tokens[:0], engine.hbm, slots, sums)
    )
    engine.wait(lambda: flight.done)
    assert flight.status.tolist() == [LANDED, FAILED, FAILED]
    assert flight.checksums[0] == sums[0]
    assert engine.held(tokens) == 1
    assert shared.numbers()["sidecar.held_blocks"] == 0


class Registry:
    """Records what a GPU device would be told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []

    def register(self, pool: ArrayPool) -> None:
        self.heard.append(("register", id(pool), len(pool.array)))

    def forget(self, pool: ArrayPool) -> None:
        self.heard.append(("forget", id(pool), len(pool.array)))


def test_a_gpu_hears_of_each_slab_before_its_first_use_and_before_it_is_unmapped(
    sidecar: Sidecar, join: Join
) -> None:
    engine, registry = join(sidecar), Registry()
    tier = SidecarTier.connect(
        sidecar.socket, LAYOUT, mover=engine.mover, signal=engine.signal, registrar=registry
    )
    sidecar.end(signal.SIGKILL)
    sidecar.start()
    engine.wait(lambda: tier.statistics().connections == 2)
    tier.close()
    names, pools, lengths = zip(*registry.heard, strict=True)
    assert sorted(names) == ["forget", "forget", "register", "register"]
    assert names[0] == "register" and names[-1] == "forget"
    assert pools[0] != pools[-1] and set(lengths) == {sidecar.num_slots}


def test_a_put_that_waits_for_room_holds_up_no_other_request(
    sidecar_with: StartSidecar, join: Join, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=10)
    engine, one, two = join(sidecar), speak(sidecar), speak(sidecar)
    here, waiting = tokens_of(2), tokens_of(1, seed=1)
    assert (engine.put(here).status == LANDED).all()
    assert isinstance(one.reserve(5), wire.Reserved)
    assert isinstance(two.reserve(2), wire.Reserved)
    # The last slot and the two blocks' own are the neighbours' too: nothing is left.
    pinned = two.ask(wire.Acquire(9, NAMESPACE, wire.ints_to_bytes(here), 0))
    assert isinstance(pinned, wire.Progress) and len(pinned.sources) == 2
    last = two.reserve(1)
    assert isinstance(last, wire.Reserved)
    put, slots = engine.start_put(waiting)
    assert engine.held(here) == 2
    assert engine.fetch(here)[1] == [True] * 2
    assert not put.done
    assert isinstance(two.ask(wire.GiveBack(two.new_id(), last.slots)), wire.Released)
    engine.wait(lambda: put.done)
    assert (put.status == LANDED).all()
    engine.hbm.free(slots)


def test_closing_fails_what_cannot_end_and_leaves_nothing_held(shared: Sidecar, join: Join) -> None:
    engine = join(shared)
    tokens = tokens_of(4)
    assert (engine.put(tokens).status == LANDED).all()
    fetch, slots = engine.start_fetch(tokens)
    engine.tier.close()
    engine.tier.close()
    assert fetch.done
    assert engine.held(tokens) == 0
    engine.hbm.free(slots)
    numbers = shared.numbers()
    assert numbers["sidecar.held_blocks"] == numbers["sidecar.quarantined_blocks"] == 0
    assert numbers["cache.leases"] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_engines_that_share_blocks_under_eviction_never_see_a_wrong_byte(
    sidecar_with: StartSidecar, join: Join, seed: int
) -> None:
    """Three engines put and fetch overlapping paths through a slab that holds a third of them."""
    sidecar = sidecar_with(num_slots=29)
    engines = [join(sidecar) for _ in range(3)]
    root = tokens_of(5)
    paths = [np.concatenate([root[: (n % 6) * SIZE], tokens_of(11, seed=n)]) for n in range(8)]

    def live(engine: Engine, rng: np.random.Generator) -> int:
        landed = 0
        for _ in range(25):
            path = paths[int(rng.integers(len(paths)))]
            path = path[: int(rng.integers(1, 1 + len(path) // SIZE)) * SIZE]
            if rng.random() < 0.4:
                engine.put(path)
                continue
            flight, right = engine.fetch(path)
            reached = int(np.count_nonzero(flight.status == LANDED))
            assert (flight.status[:reached] == LANDED).all()
            assert right[:reached] == [True] * reached
            landed += reached
        return landed

    with ThreadPoolExecutor(len(engines)) as threads:
        lives = [
            threads.submit(live, engine, np.random.default_rng((seed, number)))
            for number, engine in enumerate(engines)
        ]
        assert sum(life.result() for life in lives) > 0
    for engine in engines:
        engine.tier.close()
    wait_for(lambda: sidecar.numbers()["cache.in_flight"] == 0)
    numbers = sidecar.numbers()
    assert numbers["sidecar.held_blocks"] == numbers["sidecar.quarantined_blocks"] == 0
    assert numbers["cache.dram.free"] + numbers["cache.dram.resident"] == 29
    assert numbers["sidecar.checksum_mismatches"] == numbers["nvme.quarantined"] == 0
    assert (numbers["nvme.state.ok"], numbers["nvme.state.hung"]) == (1, 0)
    assert numbers["nvme.errors.eio"] == numbers["nvme.trips"] == 0


# ---- under the cache ----------------------------------------------------------------------------


def compute(engine: Engine, cache: TieredCache, tokens: Tokens) -> None:
    """What an engine does with a prompt of whole blocks that it has never seen."""
    lease = cache.acquire(NAMESPACE, tokens)
    assert lease.ticket.wait(None)
    cache.extend(lease, len(tokens) // SIZE - lease.cached_tokens // SIZE)
    for slot, key in zip(lease.block_table.tolist(), keys_of(tokens), strict=True):
        engine.hbm.view(slot)[:] = block_bytes(key, LAYOUT.nbytes)
    cache.commit(lease, tokens)
    cache.release(lease)


def hits(engine: Engine, cache: TieredCache, tokens: Tokens) -> dict[TierId, int]:
    """Take a path from the cache, check every byte, say where it came from (in blocks)."""
    lease = cache.acquire(NAMESPACE, tokens)
    assert lease.ticket.wait(None)
    for slot, key in zip(lease.block_table.tolist(), keys_of(tokens), strict=False):
        assert np.array_equal(engine.hbm.view(slot), block_bytes(key, LAYOUT.nbytes))
    found = {tier: n // SIZE for tier, n in lease.hit_tokens.items()}
    cache.release(lease)
    return found


def test_an_engines_cache_hits_in_hbm_then_the_sidecars_dram_then_its_nvme(
    sidecar: Sidecar, join: Join, closing: ExitStack
) -> None:
    engine = join(sidecar)
    cache = TieredCache(SIZE, [engine.hbm], [engine.tier], engine.mover, engine.signal)
    closing.callback(cache.close)
    tokens = tokens_of(13)
    compute(engine, cache, tokens)
    assert hits(engine, cache, tokens) == {TierId.HBM: 13}
    assert cache.shed(TierId.HBM) == 13
    assert hits(engine, cache, tokens) == {TierId.DRAM: 13}
    assert hits(engine, cache, tokens) == {TierId.HBM: 13}
    ticket = cache.flush(NAMESPACE, tokens)
    assert ticket.wait(None) and ticket.blocks == 13
    ticket.close()
    sidecar.end(signal.SIGKILL)
    assert cache.shed(TierId.HBM) == 13
    engine.wait(lambda: not engine.tier.statistics().connected)
    assert hits(engine, cache, tokens) == {}
    sidecar.start()
    engine.wait(lambda: engine.tier.statistics().connected)
    assert hits(engine, cache, tokens) == {TierId.NVME: 13}
    cache.check()
