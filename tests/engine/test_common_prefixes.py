"""Groups of sequences with the same leading slots, against every single group."""

from itertools import combinations

import numpy as np
import pytest

from kvtier.engine.common_prefixes import common_prefixes
from kvtier.index.words import Slots

UNIT, BLOCK = 4, 2


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


def shared(tables: list[Slots], members: list[int]) -> int:
    """Whole units of positions in which all members' tables agree."""
    lists = [tables[member].tolist() for member in members]
    same = 0
    for entries in zip(*lists, strict=False):
        if len(set(entries)) > 1:
            break
        same += 1
    return same * BLOCK // UNIT


def test_documents_are_preferred_to_the_system_prompt_that_all_share() -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 13, 14, 15, 16, 17, 18]
    tables = [slots(*first, 20), slots(*second, 21), slots(*first, 22), slots(*second, 23)]
    assert common_prefixes(tables, BLOCK, UNIT) == [([0, 2], 4), ([1, 3], 4)]
    assert common_prefixes([*tables, slots(1, 2, 9)], BLOCK, UNIT) == [([0, 2], 4), ([1, 3], 4)]


def test_a_prompt_that_many_share_is_preferred_to_the_document_of_two() -> None:
    tables = [slots(1, 2, 30 + row) for row in range(6)]
    tables += [slots(1, 2, 3, 4, 40), slots(1, 2, 3, 4, 41)]
    assert common_prefixes(tables, BLOCK, UNIT) == [([*range(8)], 1)]


@pytest.mark.parametrize(
    "tables", [[], [slots(1, 2, 3)], [slots(1, 2, 3), slots(4, 2, 3)], [slots(1, 5), slots(1, 6)]]
)
def test_nothing_in_common_is_no_group(tables: list[Slots]) -> None:
    assert common_prefixes(tables, BLOCK, UNIT) == []


@pytest.mark.parametrize("seed", range(40))
def test_groups_share_what_they_say_and_no_single_group_saves_more(seed: int) -> None:
    random = np.random.default_rng(seed)
    tables: list[Slots] = []
    for row in range(int(random.integers(2, 7))):
        kept = tables[int(random.integers(len(tables)))] if tables else slots()
        kept = kept[: int(random.integers(0, len(kept) + 1))]
        fresh = 100 * (row + 1) + np.arange(random.integers(1, 8))
        tables.append(np.concatenate([kept, fresh]).astype(np.int32))
    groups = common_prefixes(tables, BLOCK, UNIT)
    rows = [row for members, _ in groups for row in members]
    assert len(set(rows)) == len(rows)
    for members, units in groups:
        assert len(members) > 1 and units == shared(tables, members) > 0
    best = max(
        (size - 1) * shared(tables, [*members])
        for size in range(2, len(tables) + 1)
        for members in combinations(range(len(tables)), size)
    )
    assert sum((len(members) - 1) * units for members, units in groups) >= best
