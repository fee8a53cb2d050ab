"""The index against a plain dictionary: random operations, every answer compared after each.

The model keys blocks by (namespace, all tokens up to the block's end) and knows nothing of nodes,
splits, counts or orders.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.index.lookahead import Waiting
from kvtier.index.policy import EvictionPolicy, LeafLru
from kvtier.index.radix import IndexCorrupt, RadixIndex
from kvtier.index.tree import Node
from kvtier.index.words import ROOT_KEY, BlockIds, Residency, Slots, TierId, Tokens, block_keys

ABSENT, FILLING = Residency.ABSENT, Residency.FILLING
RESIDENT, LEAVING = Residency.RESIDENT, Residency.LEAVING

BLOCK = 3
COLUMNS = (TierId.HBM, TierId.DRAM, TierId.NVME)
POOLS, STORE = (0, 1), 2
PROTECTABLE = (2, 5)
NAMESPACES = (b"one", b"two")

Path = tuple[bytes, tuple[int, ...]]

# Blocks that differ in their first token, in their last, and not at all from one to the next.
BLOCKS = st.sampled_from([(0, 0, 0), (0, 0, 1), (7, 0, 0)])
TOKENS = st.builds(
    lambda blocks, rest: tuple(t for b in blocks for t in b) + rest,
    st.lists(BLOCKS, max_size=6),
    st.sampled_from([(), (0,), (0, 0)]),
)
SPANS = st.tuples(st.integers(0, 10_000), st.integers(0, 6), st.integers(1, 6))


@dataclass
class Block:
    id: int
    state: list[Residency] = field(default_factory=lambda: [ABSENT] * len(COLUMNS))
    slot: list[int] = field(default_factory=lambda: [-1] * len(COLUMNS))
    pins: list[int] = field(default_factory=lambda: [0] * len(COLUMNS))

    @property
    def idle(self) -> bool:
        return not any(self.state) and not any(self.pins)

    @property
    def hint_only(self) -> bool:
        return self.state[STORE] == RESIDENT and not any(self.state[:STORE]) and not any(self.pins)


def array(values: "tuple[int, ...] | list[int]") -> Tokens:
    return np.array(values, np.int32)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.orders: list[LeafLru[Node]] = []
        self.index = RadixIndex(
            BLOCK,
            COLUMNS,
            stores=[TierId.NVME],
            policy=self.order,
            protectable=dict(zip(COLUMNS, PROTECTABLE, strict=False)),
        )
        self.model: dict[Path, Block] = {}
        self.next_slot = 0

    def order(self, tier: TierId) -> EvictionPolicy[Node]:
        self.orders.append(LeafLru())
        return self.orders[-1]

    # ---- the model -------------------------------------------------------------------------------

    def above(self, path: Path) -> Path:
        return path[0], path[1][:-BLOCK]

    def is_below(self, path: Path, other: Path) -> bool:
        """Whether `path` lies strictly below `other`."""
        return (
            path[0] == other[0]
            and len(path[1]) > len(other[1])
            and path[1][: len(other[1])] == other[1]
        )

    def span(self, span: tuple[int, int, int]) -> list[Path]:
        """A root-first run of one branch, chosen by numbers."""
        pick, start, length = span
        namespace, tokens = sorted(self.model)[pick % len(self.model)]
        whole = [(namespace, tokens[: i + BLOCK]) for i in range(0, len(tokens), BLOCK)]
        start = min(start, len(whole) - 1)
        return whole[start : start + length]

    def ids(self, paths: list[Path]) -> BlockIds:
        return array([self.model[path].id for path in paths])

    def forget_model(self, paths: list[Path]) -> None:
        for path in sorted(paths, key=lambda p: -len(p[1])):
            while (
                path in self.model
                and self.model[path].idle
                and not any(self.is_below(other, path) for other in self.model)
            ):
                del self.model[path]
                path = self.above(path)

    def in_state(self, col: int, span: tuple[int, int, int], state: Residency) -> list[Path]:
        return [p for p in self.span(span) if self.model[p].state[col] == state]

    def shift(self, col: int, paths: list[Path], state: Residency) -> None:
        for path in paths:
            self.model[path].state[col] = state

    def left(self, col: int, paths: list[Path], slots: Slots) -> None:
        assert slots.tolist() == [self.model[path].slot[col] for path in paths]
        self.shift(col, paths, ABSENT)
        for path in paths:
            self.model[path].slot[col] = -1
        self.forget_model(paths)

    def expected(self, col: int, waiting: list[Path]) -> set[Path]:
        """What look-ahead keeps: of each path from its root, the first ones first."""
        kept: set[Path] = set()
        for namespace, tokens in waiting:
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                path = namespace, tokens[:end]
                if path not in self.model or len(kept) == PROTECTABLE[col]:
                    break
                block = self.model[path]
                if block.state[col] == RESIDENT and not block.pins[col]:
                    kept.add(path)
        return kept

    def may_go(self, col: int, kept: set[Path]) -> set[Path]:
        """The largest set that could leave the column, leaves first."""
        found: set[Path] = set()
        for path in sorted(self.model, key=lambda p: -len(p[1])):
            block = self.model[path]
            if block.state[col] != RESIDENT or block.pins[col] or path in kept:
                continue
            below = [p for p in self.model if self.is_below(p, path) and self.model[p].state[col]]
            if all(p in found for p in below):
                found.add(path)
        return found

    # ---- rules -----------------------------------------------------------------------------------

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def insert(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        ids = self.index.insert(namespace, array(tokens))
        assert len(ids) == len(tokens) // BLOCK
        for i, block in enumerate(ids.tolist()):
            path = namespace, tokens[: (i + 1) * BLOCK]
            if path not in self.model:
                assert block not in {b.id for b in self.model.values()}
                self.model[path] = Block(block)
            assert self.model[path].id == block

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=TOKENS)
    def match(self, namespace: bytes, tokens: tuple[int, ...]) -> None:
        expected = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            if (namespace, tokens[:end]) not in self.model:
                break
            expected.append(self.model[namespace, tokens[:end]].id)
        assert self.index.match(namespace, array(tokens)).tolist() == expected

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def begin_fill(self, col: int, span: tuple[int, int, int]) -> None:
        paths = self.in_state(col, span, ABSENT)
        slots = np.arange(self.next_slot, self.next_slot + len(paths), dtype=np.int32)
        self.next_slot += len(paths)
        self.index.begin_fill(col, self.ids(paths), slots)
        self.shift(col, paths, FILLING)
        for path, slot in zip(paths, slots.tolist(), strict=True):
            self.model[path].slot[col] = slot

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS, cold=st.booleans())
    def finish_fill(self, col: int, span: tuple[int, int, int], cold: bool) -> None:
        paths = self.in_state(col, span, FILLING)
        self.index.finish_fill(col, self.ids(paths))
        self.shift(col, paths, RESIDENT)
        if cold:
            self.index.touch_cold(col, self.ids(paths))

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def abort_fill(self, col: int, span: tuple[int, int, int]) -> None:
        paths = self.in_state(col, span, FILLING)
        self.left(col, paths, self.index.abort_fill(col, self.ids(paths)))

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def begin_leave(self, col: int, span: tuple[int, int, int]) -> None:
        paths = [p for p in self.in_state(col, span, RESIDENT) if not self.model[p].pins[col]]
        self.index.begin_leave(col, self.ids(paths))
        self.shift(col, paths, LEAVING)

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def cancel_leave(self, col: int, span: tuple[int, int, int]) -> None:
        paths = self.in_state(col, span, LEAVING)
        self.index.cancel_leave(col, self.ids(paths))
        self.shift(col, paths, RESIDENT)

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def finish_leave(self, col: int, span: tuple[int, int, int]) -> None:
        paths = self.in_state(col, span, LEAVING)
        self.left(col, paths, self.index.finish_leave(col, self.ids(paths)))

    @precondition(lambda self: self.model)
    @rule(span=SPANS)
    def set_hint(self, span: tuple[int, int, int]) -> None:
        paths = self.span(span)
        self.index.set_hint(STORE, self.ids(paths))
        self.shift(STORE, paths, RESIDENT)

    @precondition(lambda self: self.model)
    @rule(span=SPANS)
    def clear_hint(self, span: tuple[int, int, int]) -> None:
        top = self.span(span)[0]
        cleared = [p for p in self.model if p == top or self.is_below(p, top)]
        cleared = [p for p in cleared if self.model[p].state[STORE] == RESIDENT]
        self.index.clear_hint(STORE, self.ids(self.span(span)))
        self.shift(STORE, cleared, ABSENT)
        self.forget_model(cleared)

    @precondition(lambda self: self.model)
    @rule(col=st.integers(0, 2), span=SPANS)
    def pin(self, col: int, span: tuple[int, int, int]) -> None:
        paths = self.span(span)
        self.index.pin(col, self.ids(paths))
        for path in paths:
            self.model[path].pins[col] += 1

    @precondition(lambda self: self.model)
    @rule(col=st.integers(0, 2), span=SPANS)
    def unpin(self, col: int, span: tuple[int, int, int]) -> None:
        paths = [p for p in self.span(span) if self.model[p].pins[col]]
        self.index.unpin(col, self.ids(paths))
        for path in paths:
            self.model[path].pins[col] -= 1
        self.forget_model(paths)

    @precondition(lambda self: self.model)
    @rule(span=SPANS)
    def forget(self, span: tuple[int, int, int]) -> None:
        paths = self.span(span)
        self.index.forget(self.ids(paths))
        self.forget_model(paths)

    @precondition(lambda self: self.model)
    @rule(col=st.integers(0, 2), span=SPANS)
    def touch(self, col: int, span: tuple[int, int, int]) -> None:
        self.index.touch(col, self.ids(self.span(span)))

    @precondition(lambda self: self.model)
    @rule(span=SPANS)
    def found(self, span: tuple[int, int, int]) -> None:
        self.index.found(self.ids(self.span(span)))

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS)
    def retire(self, col: int, span: tuple[int, int, int]) -> None:
        self.index.retire(col, self.ids(self.span(span)))

    @precondition(lambda self: self.model)
    @rule(
        col=st.sampled_from(POOLS),
        n=st.integers(0, 9),
        spans=st.lists(SPANS, max_size=3),
        leave=st.booleans(),
    )
    def evict(self, col: int, n: int, spans: list[tuple[int, int, int]], leave: bool) -> None:
        waiting = [self.span(span)[-1] for span in spans]
        self.index.expect([Waiting(namespace, array(tokens)) for namespace, tokens in waiting])
        victims = self.index.victims(col, n)
        by_id = {block.id: path for path, block in self.model.items()}
        chosen = [by_id[block] for block in victims.tolist()]
        may_go = self.may_go(col, set())
        others = self.may_go(col, self.expected(col, waiting))
        assert len(chosen) == min(n, len(may_go))
        assert set(chosen[: len(others)]) <= others, "what is expected goes last"
        for position, path in enumerate(chosen):
            assert path in may_go
            below = [p for p in self.model if self.is_below(p, path) and self.model[p].state[col]]
            assert all(p in chosen[:position] for p in below)
        if leave:
            self.index.begin_leave(col, victims)
            self.left(col, chosen, self.index.finish_leave(col, victims))

    @precondition(lambda self: self.model)
    @rule(span=SPANS)
    def keys(self, span: tuple[int, int, int]) -> None:
        paths = self.span(span)
        namespace, tokens = paths[-1]
        expected = block_keys(namespace, ROOT_KEY, array(tokens), BLOCK)
        assert self.index.keys(self.ids(paths)) == expected[-len(paths) :]
        above = expected[-len(paths) - 1] if len(paths) < len(expected) else ROOT_KEY
        first = self.model[paths[0]].id
        assert self.index.parent_key(first) == above
        assert self.index.namespace_of(first) == namespace
        run = tokens[len(tokens) - len(paths) * BLOCK :]
        assert tuple(self.index.tokens_of(self.ids(paths)).tolist()) == run
        path = self.index.path(self.model[paths[-1]].id)
        assert path.tolist() == self.index.match(namespace, array(tokens)).tolist()

    @precondition(lambda self: self.model)
    @rule(col=st.sampled_from(POOLS), span=SPANS, wanted=st.sampled_from([FILLING, LEAVING]))
    def illegal(self, col: int, span: tuple[int, int, int], wanted: Residency) -> None:
        """A run with one block in the wrong state is refused as a whole; `unchanged` looks."""
        paths = self.span(span)
        if all(self.model[path].state[col] == wanted for path in paths):
            return
        steps = (
            (self.index.finish_fill, self.index.abort_fill)
            if wanted == FILLING
            else (self.index.cancel_leave, self.index.finish_leave)
        )
        for step in steps:
            with pytest.raises(IndexCorrupt):
                step(col, self.ids(paths))

    # ---- after every step ------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        blocks = list(self.model.values())
        ids = array([block.id for block in blocks])
        for col in range(len(COLUMNS)):
            assert self.index.state(col, ids).tolist() == [b.state[col] for b in blocks]
            assert self.index.slots(col, ids).tolist() == [b.slot[col] for b in blocks]
        statistics = self.index.statistics()
        assert statistics.blocks == len(blocks)
        assert statistics.hint_only == sum(b.hint_only for b in blocks)
        for col, column in enumerate(statistics.columns):
            states = [b.state[col] for b in blocks]
            assert column.resident == states.count(RESIDENT)
            assert column.filling == states.count(FILLING)
            assert column.leaving == states.count(LEAVING)
            assert column.pinned == sum(b.pins[col] > 0 for b in blocks)

    @invariant()
    def every_node_is_older_than_its_ancestors(self) -> None:
        for order in self.orders:
            seen: set[Node] = set()
            for node in order:
                seen.add(node)
                above = node.parent
                while above is not None:
                    assert above not in seen
                    above = above.parent


IndexMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestIndexAgainstModel = IndexMachine.TestCase


def walk(seed: int, steps: int) -> IndexMachine:
    """Seeded random steps of the same machine: longer histories than Hypothesis tries."""
    rng = np.random.default_rng(seed)
    machine = IndexMachine()

    def number(below: int) -> int:
        return int(rng.integers(below))

    def span() -> tuple[int, int, int]:
        return number(10_000), number(4), 1 + number(5)

    def tokens() -> tuple[int, ...]:
        kinds = ((0, 0, 0), (0, 0, 1), (7, 0, 0))
        blocks = [kinds[min(number(4), 2)] for _ in range(number(6))]
        return tuple(t for block in blocks for t in block) + (0,) * number(BLOCK)

    def pool() -> int:
        return number(len(POOLS))

    rules = [
        lambda: machine.insert(NAMESPACES[number(2)], tokens()),
        lambda: machine.match(NAMESPACES[number(2)], tokens()),
        lambda: machine.begin_fill(pool(), span()),
        lambda: machine.begin_fill(pool(), span()),
        lambda: machine.finish_fill(pool(), span(), number(2) == 0),
        lambda: machine.finish_fill(pool(), span(), number(2) == 0),
        lambda: machine.abort_fill(pool(), span()),
        lambda: machine.begin_leave(pool(), span()),
        lambda: machine.cancel_leave(pool(), span()),
        lambda: machine.finish_leave(pool(), span()),
        lambda: machine.set_hint(span()),
        lambda: machine.clear_hint(span()),
        lambda: machine.pin(number(3), span()),
        lambda: machine.unpin(number(3), span()),
        lambda: machine.unpin(number(3), span()),
        lambda: machine.forget(span()),
        lambda: machine.touch(number(3), span()),
        lambda: machine.found(span()),
        lambda: machine.retire(pool(), span()),
        lambda: machine.evict(
            pool(), number(6), [span() for _ in range(number(3))], number(2) == 0
        ),
        lambda: machine.keys(span()),
        lambda: machine.illegal(pool(), span(), (FILLING, LEAVING)[number(2)]),
    ]
    for _ in range(steps):
        if not machine.model:
            rules[0]()
            continue
        rules[number(len(rules))]()
        machine.agrees()
        machine.every_node_is_older_than_its_ancestors()
    return machine


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_random_history_agrees_with_the_model(seed: int) -> None:
    machine = walk(seed, 1_500)
    assert machine.next_slot > 100  # it did fill something


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_random_steps_agree_with_the_model() -> None:
    assert walk(0, 100_000).next_slot > 10_000
