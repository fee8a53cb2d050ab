"""What is worth writing: learned from what returns, against room, within an allowance."""

import numpy as np
import pytest

from kvtier.index.admission import CLASSES, Admission, Marks, marks_of
from kvtier.index.words import ROOT_KEY, as_tokens, block_keys

NONE = np.inf


def path(*documents: int, blocks: int = 8) -> Marks:
    """Marks of a path made of these documents one after another."""
    tokens = np.repeat(np.array(documents, np.int32), blocks)
    return marks_of(block_keys(bytes(32), ROOT_KEY, as_tokens(tokens), 1))


def leave(learner: Admission, marks: Marks, now: float = 0.0, allowed: float = NONE) -> None:
    learner.left(marks, np.ones(len(marks), np.bool_))
    if learner.is_due():
        learner.review(now, allowed, 1000.0)


def one_shot(learner: Admission, first: int, count: int, allowed: float = NONE) -> None:
    """Documents that come once, and leave."""
    for document in range(first, first + count):
        learner.asked(path(document))
        leave(learner, path(document), float(document), allowed)


def written(learner: Admission) -> dict[str, float]:
    return {name: each.written for name, each in learner.statistics().classes.items()}


def test_before_anything_is_known_all_is_worth_it() -> None:
    learner = Admission(64, 512)
    assert learner.worth(path(1)).all()
    learner.asked(path(1))
    assert learner.worth(path(1)).all()
    assert set(written(learner)) == set(CLASSES)


def test_what_never_returns_is_soon_not_worth_it_but_what_was_asked_twice_is() -> None:
    learner = Admission(64, 512)
    one_shot(learner, 1000, 200)
    learner.asked(path(1))
    assert not learner.worth(path(1)).any()
    learner.asked(path(1))
    assert learner.worth(path(1)).all()


def test_what_returns_as_a_rule_is_worth_it_at_its_first_leaving() -> None:
    learner = Admission(64, 512)
    for document in range(1000, 1200):
        learner.asked(path(document))
        leave(learner, path(document))
        if document >= 1020:
            learner.asked(path(document - 20))
    learner.asked(path(1))
    assert learner.worth(path(1)).all()
    returns = learner.statistics().classes["new, asked again 0"].returns
    assert returns > 0.5


def test_growth_of_a_conversation_is_told_from_documents_that_come_once() -> None:
    """Both are new blocks; one half returns each time, grown, the other never."""
    learner = Admission(64, 512)
    talks: list[tuple[int, ...]] = [(talk,) for talk in range(10)]
    for turn in range(60):
        for talk in range(10):
            talks[talk] = (*talks[talk][-6:], 100 + turn) if turn % 6 else (talk, turn + 500)
            learner.asked(path(*talks[talk], blocks=2))
            leave(learner, path(*talks[talk], blocks=2))
        one_shot(learner, 10_000 + 10 * turn, 10)
    learner.asked(path(1, 2, blocks=2))
    learner.asked(path(1, 2, 3, blocks=2))  # the next turn
    learner.asked(path(9_999))
    assert learner.worth(path(1, 2, 3, blocks=2))[-2:].all()
    assert not learner.worth(path(9_999)).any()


def test_a_class_that_pays_for_itself_is_given_up_where_it_costs_others_more() -> None:
    """One in five comes back, but so late that a store of everything has lost the others."""

    def learned(store: int) -> dict[str, float]:
        learner = Admission(16, store, price=0.0)
        rng = np.random.default_rng(0)
        for step in range(3000):
            learner.asked(path(10_000 + step))
            leave(learner, path(10_000 + step))
            often = int(rng.integers(0, 60))
            learner.asked(path(often))
            leave(learner, path(often))
        return written(learner)

    small = learned(700)
    assert small["new, asked again 2+"] == 1.0
    assert small["new, asked again 0"] == 0.0


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_writes_keep_to_what_is_allowed_and_the_price_rises(share: float) -> None:
    """Everything returns; only a share may be written: whole documents are, about so many."""
    learner = Admission(64, 512)
    sent = left = 0
    for document in range(1000, 1600):
        learner.asked(path(document))
        if document >= 1020:
            learner.asked(path(document - 20))
        marks = path(document)
        worth = learner.worth(marks)
        assert not 0.3 < worth.mean() < 0.7, "of a document all is, but for what lost its slot"
        leave(learner, marks, now=float(document), allowed=share * 8 * 1000)  # 8 blocks a second
        if document >= 1200:
            sent += int(worth.sum())
            left += len(marks)
    assert abs(sent / left - share) < 0.12
    assert learner.statistics().price > 0.3


def test_with_nothing_allowed_nothing_is_written() -> None:
    learner = Admission(64, 512)
    one_shot(learner, 1000, 50, allowed=0.0)
    learner.asked(path(1))
    learner.asked(path(1))
    assert not learner.worth(path(1)).any()


def test_a_busy_hour_may_spend_what_quiet_ones_left() -> None:
    """What counts is the pace over all that is remembered, not that of the last moment."""
    learner = Admission(64, 512)

    def turn(document: int, now: float) -> None:
        learner.asked(path(document))
        learner.asked(path(document - 20))
        leave(learner, path(document), now=now, allowed=400.0)

    for document in range(1000, 1100):
        turn(document, 10.0 * document)
    calm = written(learner)["new, asked again 0"]
    assert calm > 0.3
    for document in range(1100, 1110):
        turn(document, 11_000.0 + document / 1000)
    assert written(learner)["new, asked again 0"] >= 0.8 * calm


def test_blocks_that_nobody_asked_for_are_remembered_when_they_leave() -> None:
    """An answer's blocks are computed by the request itself."""
    learner = Admission(64, 512)
    learner.left(path(1), np.ones(8, np.bool_))
    learner.asked(path(1))
    assert learner.worth(path(1)).all()
    one_shot(learner, 1000, 200)
    assert learner.worth(path(1)).all(), "it was asked for once since"


def test_memory_does_not_grow_with_what_passes() -> None:
    learner = Admission(16, 64)
    before = sum(len(array) for array in vars(learner).values() if isinstance(array, np.ndarray))
    one_shot(learner, 1000, 500)
    after = sum(len(array) for array in vars(learner).values() if isinstance(array, np.ndarray))
    assert after == before
    assert len(learner._times) <= 256


def test_marks_are_the_heads_of_keys() -> None:
    keys = block_keys(bytes(32), ROOT_KEY, as_tokens([1, 2, 3]), 1)
    assert marks_of(keys).tolist() == [int.from_bytes(key[:8], "little") for key in keys]
    assert len(marks_of([])) == 0
