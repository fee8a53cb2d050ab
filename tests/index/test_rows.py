"""Rows of columns, the order and the table that live in them, against lists and dictionaries."""

import numpy as np

from kvtier.index.rows import Children, Order, Rows


def test_columns_grow_together_keep_what_they_hold_and_begin_with_nothing() -> None:
    rows = Rows()
    small, large, floats = rows.integers("B"), rows.integers("q"), rows.floats()
    taken = [rows.take() for _ in range(1000)]
    assert sorted(taken) == list(range(1, 1001))
    assert len(small) == len(large) == len(floats) == len(rows) >= 1001
    assert not any(small) and not any(large) and not any(floats)
    large[1000] = 1 << 40
    late = rows.integers("i")
    taken += [rows.take() for _ in range(1000)]
    assert large[1000] == 1 << 40 and len(late) == len(large) == len(rows)
    rows.give(17)
    assert rows.take() == 17


def test_an_order_is_that_of_a_list() -> None:
    rows = Rows()
    order, model = Order(rows), list[int]()
    rng = np.random.default_rng(1)
    for row in rng.integers(1, 60, 5000).tolist():
        if row in order:
            order.remove(row)
            model.remove(row)
        else:
            order.append(row)
            model.append(row)
        assert order.first == (model[0] if model else None)
        assert [each for each in range(60) if each in order] == sorted(model)
    assert list(order) == model


def test_children_are_found_by_parent_and_mark_however_many_there_are() -> None:
    """Few marks and few parents, so that chains are long; the table doubles on the way."""
    rows = Rows()
    parents, marks = rows.integers("i"), rows.integers("I")
    children, model = Children(rows, parents, marks), dict[tuple[int, int], int]()
    rng = np.random.default_rng(2)
    pairs = rng.integers(0, 40, (20_000, 2)).tolist()
    for step, (parent, low) in enumerate(pairs):
        key = parent, low << 20
        known = model.get(key, 0)
        assert children.get(*key) == known
        if not known:
            row = model[key] = rows.take()
            parents[row], marks[row] = key
            children.add(row)
        elif step % 3 == 0:
            children.remove(known)
            del model[key]
            rows.give(known)
    assert len(model) > 500
    assert all(children.get(*key) == row for key, row in model.items())


def test_a_child_that_was_taken_out_stays_out_when_the_table_doubles() -> None:
    rows = Rows()
    parents, marks = rows.integers("i"), rows.integers("I")
    children = Children(rows, parents, marks)
    out = [rows.take() for _ in range(300)]
    for number, row in enumerate(out):
        parents[row], marks[row] = 5, number
    for row in out[:40]:
        children.add(row)
    for row in out[:20]:
        children.remove(row)
    for row in out[40:]:
        children.add(row)
    for number, row in enumerate(out):
        assert children.get(5, number) == (0 if number < 20 else row)
