"""The simulated device catches what it is there to catch; the store on it keeps its contract."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.words import ROOT_KEY, BlockKey, TierId, as_tokens
from kvtier.tiers.contracts import Fetch, Flight, Put, Store
from kvtier.tiers.device import D2H, H2D, Copy, Device
from kvtier.tiers.hazards import HazardError
from kvtier.tiers.pool import ArrayPool
from kvtier.tiers.simulated import SimDevice, SimSignal, SimStore, places
from tests.prf import block_bytes

BB = 96
NAMESPACE = bytes(range(32))
NO_TOKENS = as_tokens([])


def make_pools(n: int = 7) -> tuple[ArrayPool, ArrayPool]:
    return ArrayPool(TierId.HBM, n, BB), ArrayPool(TierId.DRAM, n, BB)


def one_copy(sim: SimDevice, stream: str, copy: Copy) -> Flight:
    flight = Flight(1, sim.signal)
    sim.submit(stream, [copy], [], flight, checksum=False)
    return flight


def chain(n: int, salt: str = "") -> tuple[BlockKey, ...]:
    return tuple(BlockKey(f"{salt}{i}".encode().ljust(32, b".")) for i in range(n))


def filled(pool: ArrayPool, keys: tuple[BlockKey, ...]) -> Put:
    slots = pool.alloc(len(keys))
    for slot, key in zip(slots.tolist(), keys, strict=True):
        pool.view(slot)[:] = block_bytes(key, BB)
    return Put(NAMESPACE, ROOT_KEY, NO_TOKENS, keys, NO_TOKENS, pool, slots, None)


def fetching(pool: ArrayPool, keys: tuple[BlockKey, ...]) -> Fetch:
    slots = pool.alloc(len(keys))
    return Fetch(NAMESPACE, ROOT_KEY, NO_TOKENS, keys, NO_TOKENS, pool, slots)


# ---- hazards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ((0, 1), (1, 2), "read after write"),  # slot pairs (from, to); 1 is shared
        ((0, 1), (2, 1), "write after write"),
        ((1, 0), (2, 1), "write after read"),
    ],
)
def test_a_copy_without_its_edge_is_refused_and_with_it_runs(
    first: tuple[int, int], second: tuple[int, int], kind: str
) -> None:
    sim = SimDevice(1)
    pool, _ = make_pools()
    a, b = Copy(pool, first[0], pool, first[1]), Copy(pool, second[0], pool, second[1])
    edge = sim.submit(H2D, [a], [], Flight(1, sim.signal), checksum=False)
    with pytest.raises(HazardError, match=rf"{kind} on hbm\[1\].*'copy.*'copy"):
        sim.submit(D2H, [b], [], Flight(1, sim.signal), checksum=False)
    sim = SimDevice(1)
    edge = sim.submit(H2D, [a], [], Flight(1, sim.signal), checksum=False)
    flight = Flight(1, sim.signal)
    sim.submit(D2H, [b], [edge], flight, checksum=False)
    sim.run_all()
    assert flight.done


def test_an_edge_may_go_through_other_work_and_other_streams() -> None:
    sim = SimDevice(2)
    pool, other = make_pools()
    sim.schedule("write", lambda: None, stream="a", writes=[(pool, 3)])
    middle = sim.schedule("between", lambda: None, stream="a")
    sim.schedule("far", lambda: None, [middle], stream="b")
    sim.schedule("read", lambda: None, stream="b", reads=[(pool, 3)])
    with pytest.raises(HazardError, match="'alone' is not ordered after 'write'"):
        sim.schedule("alone", lambda: None, reads=[(pool, 3)])
    assert sim.schedule("elsewhere", lambda: None, reads=[(other, 3)]).error is None


def test_work_that_is_over_needs_no_edge() -> None:
    sim = SimDevice(3)
    pool, _ = make_pools()
    one_copy(sim, H2D, Copy(pool, 0, pool, 1))
    sim.run_all()
    assert not one_copy(sim, D2H, Copy(pool, 2, pool, 1)).done


def test_two_readers_need_no_order_between_them() -> None:
    sim = SimDevice(3)
    pool, _ = make_pools()
    one_copy(sim, H2D, Copy(pool, 0, pool, 1))
    one_copy(sim, D2H, Copy(pool, 0, pool, 2))
    assert sim.num_pending == 2


def test_a_fence_orders_later_work_on_its_stream() -> None:
    sim = SimDevice(4, async_compute=True)
    pool, _ = make_pools()
    event = sim.submit(H2D, [Copy(pool, 0, pool, 1)], [], Flight(1, sim.signal), checksum=False)
    sim.wait_for("compute", [event])
    reader = sim.launch("attend", lambda: None, reads=places(pool, np.array([1], np.int32)))
    sim.run_all()
    assert reader.done


# ---- orders and time ----------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_each_stream_keeps_its_order_and_everything_runs(streams: list[str], seed: int) -> None:
    sim = SimDevice(seed)
    ran: list[int] = []
    for i, stream in enumerate(streams):
        sim.schedule(str(i), partial(ran.append, i), stream=stream)
    sim.run_all()
    assert sorted(ran) == list(range(len(streams)))
    for stream in "abc":
        mine = [i for i in ran if streams[i] == stream]
        assert mine == sorted(mine)


def test_seeds_reach_different_orders() -> None:
    orders = set()
    for seed in range(20):
        sim = SimDevice(seed)
        ran: list[str] = []
        for name in "xyz":
            sim.schedule(name, partial(ran.append, name))
        sim.run_all()
        orders.add("".join(ran))
    assert len(orders) == 6


def test_waiting_does_work_until_news_and_with_nothing_to_do_passes_time() -> None:
    sim = SimDevice(5)
    pool, _ = make_pools()
    sim.schedule("silent", lambda: None, stream=H2D)
    flight = one_copy(sim, H2D, Copy(pool, 0, pool, 1))
    sim.signal.wait(sim.signal.ticks, 3.0)
    assert flight.done and sim.clock() == 0.0
    sim.signal.wait(sim.signal.ticks - 1, 3.0)
    assert sim.clock() == 0.0
    sim.signal.wait(sim.signal.ticks, 3.0)
    assert sim.clock() == 3.0


def test_a_signal_of_nobody_refuses_to_wait() -> None:
    with pytest.raises(RuntimeError, match="SimDevice"):
        SimSignal().wait(0, 1.0)


def test_reading_before_a_copy_has_landed_reads_garbage_for_some_seed() -> None:
    early = set()
    for seed in range(20):
        sim = SimDevice(seed)
        pool, _ = make_pools()
        pool.view(1)[:] = 7
        one_copy(sim, H2D, Copy(pool, 0, pool, 1))
        early.add(int(pool.view(1)[0]))
        sim.run_all()
        assert (pool.view(1) == pool.view(0)).all()
    assert early == {7, 0xA5}


def test_a_slot_that_queued_work_still_reads_is_not_spoilt() -> None:
    for seed in range(20):
        sim = SimDevice(seed)
        pool, _ = make_pools()
        pool.view(1)[:] = 7
        one_copy(sim, H2D, Copy(pool, 1, pool, 2))
        one_copy(sim, H2D, Copy(pool, 3, pool, 1))
        sim.run_all()
        assert (pool.view(2) == 7).all()


def test_a_fault_fails_its_block_alone_and_spoils_the_destination() -> None:
    sim = SimDevice(6, faults=lambda name: "hbm[1]" in name)
    device: Device = sim
    pool, _ = make_pools()
    flight = Flight(2, sim.signal)
    event = device.submit(
        H2D, [Copy(pool, 0, pool, 1), Copy(pool, 0, pool, 2)], [], flight, checksum=False
    )
    assert event.wait(None)
    landed, failed = flight.news()
    assert (landed.tolist(), failed.tolist()) == ([1], [0])
    assert not (pool.view(1) == pool.view(0)).all()


# ---- the store ----------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_the_store_gives_back_what_it_was_given(seed: int, n: int) -> None:
    sim = SimDevice(seed)
    store: Store = SimStore(TierId.NVME, sim)
    source, target = make_pools(n)
    keys = chain(n)
    put = store.put(filled(source, keys))
    sim.run_all()
    assert put.done and len(put.news()[0]) == n
    found = store.lookup(NAMESPACE, (*keys, *chain(1, "other")), NO_TOKENS)
    durable = store.persist(NAMESPACE, keys[1:], NO_TOKENS)
    elsewhere = store.lookup(bytes(32), keys, NO_TOKENS)
    request = fetching(target, keys)
    fetch = store.fetch(request)
    assert not found.done
    sim.run_all()
    assert (found.value, durable.value, elsewhere.value) == (n, n - 1, 0)
    assert fetch.sources == [TierId.NVME] * n
    for key, slot in zip(keys, request.slots.tolist(), strict=True):
        assert (target.view(slot) == block_bytes(key, BB)).all()


@pytest.mark.parametrize("where", [0, 2, 4])
def test_behind_a_faulty_block_nothing_is_kept_and_nothing_fetched(where: int) -> None:
    keys = chain(5)
    bad = {f"put {keys[where].hex()}"}
    sim = SimDevice(7, faults=lambda name: name in bad)
    store = SimStore(TierId.NVME, sim)
    source, target = make_pools(10)
    put = store.put(filled(source, keys))
    sim.run_all()
    assert put.news()[0].tolist() == list(range(where))
    bad.clear()
    store.put(filled(source, keys))
    sim.run_all()
    bad.add(f"fetch {keys[where].hex()}")
    fetch = store.fetch(fetching(target, keys))
    sim.run_all()
    assert fetch.news()[0].tolist() == list(range(where))
    store.check()


def test_a_full_store_gives_up_its_least_recently_used_leaf() -> None:
    sim = SimDevice(8)
    store = SimStore(TierId.NVME, sim, capacity=5)
    source, _ = make_pools(9)
    old, new = chain(3, "old"), chain(3, "new")
    for keys in (old, new):
        store.put(filled(source, keys))
        sim.run_all()
    store.check()
    assert [store.holds(NAMESPACE, key) for key in (*old, *new)] == [True] * 2 + [False] + [
        True
    ] * 3
    long = SimStore(TierId.NVME, sim, capacity=2)
    put = long.put(filled(source, chain(3)))
    sim.run_all()
    assert put.news()[1].tolist() == [2] and len(long) == 2


def test_a_block_whose_bytes_changed_on_the_way_is_not_kept() -> None:
    sim = SimDevice(9)
    store = SimStore(TierId.NVME, sim)
    source, _ = make_pools()
    put = filled(source, chain(2))
    wrong = Put(
        put.namespace, put.parent, put.tokens, put.keys, put.prefix, source, put.slots,
        np.array([1, 2], np.uint64),
    )  # fmt: skip
    flight = store.put(wrong)
    sim.run_all()
    assert flight.news()[1].tolist() == [0, 1] and len(store) == 0


def test_closing_fails_what_is_in_flight() -> None:
    sim = SimDevice(10)
    store = SimStore(TierId.NVME, sim)
    source, target = make_pools()
    flights = [store.put(filled(source, chain(2))), store.fetch(fetching(target, chain(2)))]
    answer = store.lookup(NAMESPACE, chain(2), NO_TOKENS)
    store.close()
    store.close()
    assert answer.value == 0 and all(flight.done for flight in flights)
    sim.run_all()
    assert len(store) == 0
    assert store.put(filled(source, chain(1))).done


def test_forgetting_a_block_forgets_what_stands_behind_it() -> None:
    sim = SimDevice(11)
    store = SimStore(TierId.NVME, sim)
    source, _ = make_pools()
    keys = chain(4)
    store.put(filled(source, keys))
    sim.run_all()
    store.forget(NAMESPACE, keys[1])
    store.check()
    assert [store.holds(NAMESPACE, key) for key in keys] == [True, False, False, False]
