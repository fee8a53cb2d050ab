"""The catalogue alone, against a model in memory: what it serves, keeps, pins and forgets.

The model knows blocks as a tree, with expiries on blocks and pins on leaves. After every step the
tables must agree with each other, what left must have been allowed to leave, and a lookup must say
exactly what the model says.
"""

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.index.words import ROOT_KEY, BlockKey
from kvtier.tiers.errors import PinRefused
from kvtier.tiers.nvme import puts
from kvtier.tiers.nvme.catalogue import Addition, Catalogue, Change, Outcome
from kvtier.tiers.nvme.check import table_problems
from kvtier.tiers.nvme.edits import FORGOTTEN
from kvtier.tiers.nvme.orders import DeleteNamespace, Expire, Order, Pin, Unpin, UnpinLabel
from kvtier.tiers.nvme.rows import Extent, Freed, Table, decode_block
from kvtier.tiers.nvme.tables import Rows

PAGE = 4096
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Each step commits, and what a sync costs is of no interest here."""

QUOTA = 12 * PAGE
SPACES = (b"a" * 32, b"b" * 32)

Id = tuple[int, int]
"""A block for the model: its extent and position, which never come back."""


@dataclass
class Block:
    space: bytes
    key: BlockKey
    parent: "Block | None"
    at: Id
    expires: float = math.inf
    leaving: bool = False

    def path(self) -> "list[Block]":
        """Itself and its ancestors."""
        return [self, *(self.parent.path() if self.parent else ())]

    def served(self, now: int) -> bool:
        return not self.leaving and all(block.expires > now for block in self.path())


def child_key(parent: BlockKey, branch: int) -> BlockKey:
    return BlockKey(blake2b(parent + bytes([branch]), digest_size=32).digest())


class CatalogueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY))
        self.now = 100
        self.blocks: dict[Id, Block] = {}
        self.extents: dict[int, Extent] = {}
        self.pins: dict[tuple[Id, str], float] = {}
        self.freed: tuple[Freed, ...] = ()
        self.next_id = 0
        self.segment, self.offset = 1, 0

    @initialize(under=st.lists(st.integers(0, 50), min_size=6, max_size=6))
    def begin(self, under: list[int]) -> None:
        """Start with a few branches, so that there is something to remove."""
        self.open()
        for step, which in enumerate(under):
            self.add(SPACES[0], which, step % 3, [1, 2, 1, 1])

    def open(self) -> None:
        self.catalogue = Catalogue.open(self.directory, read_only=False, create=True)
        self.epoch = self.catalogue.begin_epoch()

    def teardown(self) -> None:
        self.catalogue.close()
        shutil.rmtree(self.directory)

    # ---- what is done ----------------------------------------------------------------------------

    @rule(
        space=st.sampled_from((SPACES[0], *SPACES)),
        under=st.integers(0, 50),
        branch=st.integers(0, 2),
        pages=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    )
    def add(self, space: bytes, under: int, branch: int, pages: list[int]) -> None:
        """Hang an extent off a block that is or was there, or off the root."""
        parents = [b for b in self.blocks.values() if b.space == space and not b.leaving]
        parent = (parents + [None])[under % (len(parents) + 1)]
        keys, key = [], parent.key if parent else ROOT_KEY
        for _ in pages:
            key = child_key(key, branch)
            keys.append(key)
        known = {b.key: b for b in parents}
        self.next_id += 1
        extent = Extent(
            self.epoch << 32 | self.next_id,
            0,
            self.segment,
            self.offset,
            1,
            len(keys),
            parent.key if parent else ROOT_KEY,
            b"".join(keys),
            tuple(pages),
        )
        end = extent.end(extent.live)
        change = Change(additions=[Addition(space, extent, self.now)], ends={self.segment: end})
        (accepted,) = self.commit(change).accepted
        self.offset = end
        there = [known[k] for k in keys if k in known]
        if any(b.served(self.now) for b in there) or (parent and parent.at not in self.blocks):
            assert not accepted
        elif not there and (parent is None or parent.served(self.now)):
            assert accepted
        if accepted:
            self.extents[extent.id] = extent
            for position, key in enumerate(keys):
                parent = Block(space, key, parent, (extent.id, position))
                self.blocks[parent.at] = parent

    @rule(which=st.integers(0, 50), later=st.integers(0, 9))
    def touch(self, which: int, later: int) -> None:
        self.commit(
            Change(uses={self.some(which).at[0]: self.now + later}) if self.blocks else Change()
        )

    @rule(pages=st.integers(1, 20), protected=st.sets(st.integers(0, 50), max_size=3))
    def evict(self, pages: int, protected: set[int]) -> None:
        spared = {self.some(which).at[0] for which in protected} if self.blocks else set()
        held = self.held()
        before = {at for at, block in self.blocks.items() if block.served(self.now)}
        change = Change(evict_bytes=pages * PAGE, protected=spared)
        outcome = self.commit(change, evicting=True)
        assert not any(at in held or at[0] in spared for at in before - set(self.blocks))
        if outcome.num_evicted and sum(f.length for f in outcome.freed) < pages * PAGE:
            free = self.leaves() - self.held() - {at for at in self.blocks if at[0] in spared}
            assert not free, "there was more to evict"

    @rule(pages=st.sampled_from([1, 2, 3, 5, 60]))
    def shrink(self, pages: int) -> None:
        """A smaller capacity: pins give way too."""
        used = self.catalogue.counters().used_bytes
        change = Change(evict_bytes=pages * PAGE, lift_pins=True)
        self.commit(change, evicting=True, lifting=True)
        left = self.catalogue.counters().used_bytes
        assert left <= max(0, used - pages * PAGE)

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 50), limit=st.sampled_from([1, 2, 1000]))
    def quarantine(self, which: int, limit: int) -> None:
        block = self.some(which)
        block.expires = 0
        self.commit(Change(quarantine=[block.at], sweep=limit))

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, 50), delay=st.integers(-5, 20), limit=st.sampled_from([1, 1000]))
    def expire(self, which: int, delay: int, limit: int) -> None:
        block = self.some(which)
        at = FORGOTTEN if delay < 0 else self.now + delay
        answer = self.order(Expire(block.space, block.key, at), limit)
        assert answer == (0 if block.leaving and not self.served(block) else 1)

    @precondition(lambda self: self.blocks)
    @rule(
        which=st.integers(0, 50),
        label=st.sampled_from(["x", "yy"]),
        until=st.sampled_from([0, 0, 3, 15]),
    )
    def pin(self, which: int, label: str, until: int) -> None:
        block = self.some(which)
        if block.leaving:
            return
        until = self.now + until if until else 0
        have = self.catalogue.counters().pinned_bytes
        wanted = 0 if (block.at, label) in self.pins else self.unheld_bytes(block)
        answer = self.order(Pin(block.space, block.key, label, until, QUOTA), 0)
        if not block.served(self.now) or (wanted and have + wanted > QUOTA):
            assert isinstance(answer, PinRefused)
        else:
            assert answer == 1
            self.pins[block.at, label] = until or math.inf

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 50))
    def unpin(self, which: int) -> None:
        (at, label) = sorted(self.pins)[which % len(self.pins)]
        block = self.blocks[at]
        if not block.leaving:
            del self.pins[at, label]
            assert self.order(Unpin(block.space, block.key, label), 0) == 1

    @rule(label=st.sampled_from(["x", "yy"]))
    def unpin_label(self, label: str) -> None:
        lifted = [pin for pin in self.pins if pin[1] == label]
        for pin in lifted:
            del self.pins[pin]
        assert self.order(UnpinLabel(label), 0) == len(lifted)

    @rule(space=st.sampled_from((*SPACES[1:] * 3, SPACES[0])), limit=st.sampled_from([1, 3, 1000]))
    def delete(self, space: bytes, limit: int) -> None:
        gone = [b for b in self.blocks.values() if b.space == space and not b.leaving]
        for block in gone:
            block.leaving = True
        answer = self.order(DeleteNamespace(space), limit)
        assert answer == len(gone)

    @rule(by=st.integers(0, 12), limit=st.sampled_from([1, 2, 1000]))
    def wait(self, by: int, limit: int) -> None:
        self.now += by
        self.commit(Change(sweep=limit))

    @rule()
    def reopen(self) -> None:
        self.catalogue.close()
        self.open()
        self.next_id = 0
        self.segment, self.offset = self.epoch, 0

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def the_tables_agree(self) -> None:
        with self.catalogue.reading() as rows:
            assert table_problems(rows) == ()

    @invariant()
    def what_is_served_is_what_the_model_says(self) -> None:
        for block in self.blocks.values():
            branch = block.path()[::-1]
            told = self.catalogue.count(block.space, [b.key for b in branch], self.now)
            held = [b for b in self.blocks.values() if b.space == block.space and not b.leaving]
            served = {b.key for b in held if b.served(self.now)}
            count = next((i for i, b in enumerate(branch) if b.key not in served), len(branch))
            assert told == count
            assert self.catalogue.count(block.space, [block.key], self.now) == (block.key in served)

    @invariant()
    def what_is_pinned_is_what_the_model_says(self) -> None:
        most: dict[int, int] = {}
        for extent, position in self.held():
            most[extent] = max(most.get(extent, 0), position + 1)
        pinned = (replace(self.extents[id], pinned=count) for id, count in most.items())
        assert self.catalogue.counters().pinned_bytes == sum(e.pinned_bytes for e in pinned)

    # ---- how -------------------------------------------------------------------------------------

    def some(self, which: int) -> Block:
        return self.blocks[sorted(self.blocks)[which % len(self.blocks)]]

    def served(self, block: Block) -> bool:
        """Whether the catalogue knows a block of that name that is not being deleted."""
        return any(
            b.key == block.key and b.space == block.space and not b.leaving
            for b in self.blocks.values()
        )

    def leaves(self) -> set[Id]:
        return set(self.blocks) - {b.parent.at for b in self.blocks.values() if b.parent}

    def held(self) -> set[Id]:
        return {b.at for at, _ in self.pins for b in self.blocks[at].path()}

    def unheld_bytes(self, block: Block) -> int:
        held, nbytes = self.held(), 0
        for b in block.path():
            if b.at not in held:
                extent = self.extents[b.at[0]]
                nbytes += PAGE * extent.pages[b.at[1]] + PAGE * (b.at[1] == 0)
        return nbytes

    def order(self, order: Order, limit: int) -> object:
        outcome = self.commit(Change(orders=[order], sweep=limit), order=order)
        return outcome.answers[0]

    def commit(
        self,
        change: Change,
        *,
        order: Order | None = None,
        evicting: bool = False,
        lifting: bool = False,
    ) -> Outcome:
        """Commit, and take over what left, if it was allowed to."""
        outcome = self.catalogue.commit(replace(change, now=self.now, cleared=self.freed))
        self.freed = outcome.freed
        if isinstance(order, Expire):
            for block in self.blocks.values():
                if (block.space, block.key, block.leaving) == (order.namespace, order.first, False):
                    block.expires = min(block.expires, order.at)
        with self.catalogue.reading() as rows:
            there = {decode_block(body) for _, body in rows.scan(Table.BLOCKS)}
        new = {(a.extent.id, p) for a in change.additions for p in range(a.extent.live)}
        assert there - new <= set(self.blocks), "a block came from nowhere"
        for at in set(self.blocks) - there:
            assert evicting or not self.blocks[at].served(self.now), "a block left without reason"
        if change.sweep >= 1000:
            assert all(self.blocks[at].served(self.now) for at in there if at in self.blocks)
        self.blocks = {at: block for at, block in self.blocks.items() if at in there}
        self.take_over_pins(change, lifting)
        return outcome

    def take_over_pins(self, change: Change, lifting: bool) -> None:
        names = {(name.leaf, name.label) for _, name, _, _ in self.catalogue.pins()}
        for (at, label), until in list(self.pins.items()):
            gone = at not in self.blocks
            if gone or (self.blocks[at].key, label) not in names:
                assert gone or lifting or until <= self.now, "a pin was lifted without reason"
                del self.pins[at, label]
            elif change.sweep >= 1000:
                assert until > self.now, "a pin outlived its time"


CatalogueMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCatalogue = CatalogueMachine.TestCase


# ---- what it costs -------------------------------------------------------------------------------


def chain(num_extents: int, blocks: int, *, first_id: int = 1) -> list[Addition]:
    """One branch, every extent of it of `blocks` blocks of a page."""
    additions, parent = [], ROOT_KEY
    for n in range(num_extents):
        keys: list[BlockKey] = []
        for _ in range(blocks):
            keys.append(child_key(keys[-1] if keys else parent, first_id % 251))
        offset = n * (blocks + 1) * PAGE
        id = first_id + n
        pages = (1,) * blocks
        extent = Extent(id, 0, first_id, offset, 1, blocks, parent, b"".join(keys), pages)
        additions.append(Addition(SPACES[0], extent, id))
        parent = keys[-1]
    return additions


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    catalogue = Catalogue.open(tmp_path, read_only=False, create=True)
    yield catalogue
    catalogue.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Table]:
    """Counts rows read, by table."""
    counted: Counter[Table] = Counter()
    get, walk = Rows.get, Rows.walk

    def counted_get(self: Rows, table: Table, key: bytes) -> bytes | None:
        counted[table] += 1
        return get(self, table, key)

    def counted_walk(self: Rows, table: Table, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        for row in walk(self, table, start):
            counted[table] += 1
            yield row

    monkeypatch.setattr(Rows, "get", counted_get)
    monkeypatch.setattr(Rows, "walk", counted_walk)
    return counted


@pytest.mark.parametrize("blocks", [1, 7, 52])
def test_a_lookup_reads_two_rows_an_extent(
    catalogue: Catalogue, reads: Counter[Table], blocks: int
) -> None:
    additions = chain(5, blocks)
    catalogue.commit(Change(additions=additions))
    keys = [key for addition in additions for key in addition.extent.keys]
    reads.clear()
    assert catalogue.count(SPACES[0], keys, 0) == 5 * blocks
    assert reads == {Table.BLOCKS: 5, Table.EXTENTS: 5, Table.NAMESPACES: 1}
    assert list(catalogue.walk(SPACES[0], keys, 0)) == catalogue.find(SPACES[0], keys, 0)


def test_what_is_put_with_a_deletion_of_its_namespace_is_kept(catalogue: Catalogue) -> None:
    old, new = chain(1, 3), chain(1, 3, first_id=2)
    catalogue.commit(Change(additions=old))
    outcome = catalogue.commit(Change(orders=[DeleteNamespace(SPACES[0])], additions=new))
    assert (outcome.answers, outcome.num_expired, outcome.accepted) == ((3,), 3, (True,))
    assert catalogue.count(SPACES[0], new[0].extent.keys, 0) == 3
    assert catalogue.count(SPACES[0], old[0].extent.keys, 0) == 0


def test_the_rows_of_the_largest_extents_stay_in_their_pages(catalogue: Catalogue) -> None:
    catalogue.commit(Change(additions=chain(20, puts.EXTENT_BLOCKS)))
    with catalogue.reading() as rows:
        statistics = rows._txn.stat(db=rows._tables[Table.EXTENTS])
    assert statistics["entries"] == 20 and statistics["overflow_pages"] == 0


def test_eviction_reads_no_more_of_a_large_store(
    catalogue: Catalogue, reads: Counter[Table]
) -> None:
    """Nor does it begin anew for every victim, however much is protected in front."""

    def cost() -> int:
        reads.clear()
        catalogue.commit(Change(evict_bytes=10 * PAGE, protected=range(1, 4)))
        return reads.total()

    for first in range(1, 60):
        catalogue.commit(Change(additions=chain(1, 1, first_id=first)))
    small = cost()
    for first in range(60, 600):
        catalogue.commit(Change(additions=chain(1, 1, first_id=first)))
    assert cost() <= small + 1


def test_a_child_costs_the_same_however_many_its_parent_has(
    catalogue: Catalogue, reads: Counter[Table]
) -> None:
    (trunk,) = chain(1, 1)
    catalogue.commit(Change(additions=[trunk]))
    costs = []
    for n in range(2, 200):
        key = child_key(trunk.extent.tail, n)
        extent = Extent(n, 0, n, 0, 1, 1, trunk.extent.tail, key, (1,))
        reads.clear()
        catalogue.commit(Change(additions=[Addition(SPACES[0], extent, n)]))
        costs.append(reads.total())
    assert costs[-1] <= costs[1]
