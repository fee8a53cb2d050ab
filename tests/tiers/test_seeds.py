"""Programs from seeds, in orders from seeds: nothing ever reads or writes a slot out of turn."""

import re

import pytest

from kvtier.tiers.hazards import HazardError
from kvtier.tiers.mover import Mover
from tests.tiers import seeds
from tests.tiers.fences import FENCES, ROOT, Fence, judge
from tests.tiers.seeds import WORLDS, Case, Step, draw, num_seeds, problem, shrink

EVERY_WORLD = pytest.mark.parametrize("world", WORLDS)


@EVERY_WORLD
def test_five_hundred_seeds_end_well(world: str) -> None:
    seeds.judge(world, range(500))


@pytest.mark.stress
@pytest.mark.timeout(36_000)
@EVERY_WORLD
def test_ten_thousand_seeds_end_well(world: str) -> None:
    """`SEEDS` of the environment sets another number."""
    seeds.judge(world, range(num_seeds(10_000)))


@EVERY_WORLD
def test_a_seed_is_the_same_case_each_time(world: str) -> None:
    assert draw(world, 5) == draw(world, 5)
    assert draw(world, 5) != draw(world, 6)


# ---- shrinking ----------------------------------------------------------------------------------


def test_a_planted_bug_is_shrunk_to_a_few_steps_that_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots are given back while they are still used."""
    monkeypatch.setattr(Mover, "idle", lambda self, pool, slots: True)
    with pytest.raises(AssertionError) as caught:
        seeds.judge("mover", range(50))
    text = str(caught.value)
    program = text[text.index("from tests") :]
    assert len(re.findall(r"^        \('", program, re.M)) <= 3, program
    with pytest.raises(HazardError, match="is not ordered after"):
        exec(program, {})
    monkeypatch.undo()
    exec(program, {})


def test_steps_that_do_not_matter_are_left_out_and_picks_too() -> None:
    def fails(case: Case) -> bool:
        at = [verb for verb, *_ in case.steps]
        return "b" in at and "y" in at[at.index("b") :] and sum(case.picks[:3]) >= 7

    noise: tuple[Step, ...] = tuple((verb, 1, 2, 3) for verb in "abcdefghijklmnopqrstuvwxyz")
    small = shrink(Case("mover", 0, noise, (3, 4, 5, 6, 7, 8)), fails)
    assert [verb for verb, *_ in small.steps] == ["b", "y"]
    assert small.picks == (3, 4)


def test_a_case_that_fails_in_any_case_is_shrunk_to_nothing() -> None:
    small = shrink(draw("mover", 1), lambda case: True)
    assert (small.steps, small.picks) == ((), ())


def test_another_problem_is_not_taken_for_the_one_that_is_shrunk() -> None:
    assert problem(draw("mover", 1)) is None
    assert seeds.kind(ValueError("x")) != seeds.kind(AssertionError("x"))
    assert seeds.kind(None) is None


# ---- fences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", FENCES, ids=[fence.name for fence in FENCES])
def test_each_fence_stands_where_the_list_says(fence: Fence) -> None:
    assert (ROOT / fence.file).read_text().count(fence.old) == 1


def test_the_deletion_of_a_fence_is_noticed() -> None:
    verdict = judge(FENCES[0], 20)
    assert verdict.caught_by is not None and "not ordered after" in verdict.how


@pytest.mark.stress
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("fence", FENCES, ids=[fence.name for fence in FENCES])
def test_the_deletion_of_any_fence_is_noticed(fence: Fence) -> None:
    verdict = judge(fence, 500)
    assert verdict.caught_by is not None
