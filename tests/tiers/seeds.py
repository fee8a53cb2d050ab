"""One seed, one program, one order of completion: how the copies of kvtier are judged.

A *case* is a world, a list of steps and a list of picks. Steps are names and numbers, drawn without
looking at anything, so that any part of a list of steps is a list of steps; picks are what the
simulated device does next among all that streams and events allow. The worlds are programs over the
mover (`mover_program`, on three devices) and over the whole cache (`cache_program`).

A case that fails is shrunk: steps are left out as long as it still fails, then picks. What is left
is printed as Python that runs it again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from kvtier.tiers.hazards import HazardError
from tests.tiers import cache_program, mover_program
from tests.tiers.cache_program import CacheProgram

Step = tuple[str, int, int, int]
"""A verb and three numbers, to be read as the verb likes."""

Choose = Callable[[int], int]
"""One of `range(n)`."""

NUM_PICKS = 400


class Program(Protocol):
    """The state that steps work on."""

    def step(self, verb: str, a: int, b: int, c: int) -> None: ...

    def come_to_rest(self) -> None:
        """Let everything end and look at what is left."""
        ...


@dataclass(frozen=True)
class World:
    make: Callable[[Choose, int], Program]
    """The device's picks, and a number that settles sizes."""
    weights: Mapping[str, int]
    """How often each verb is drawn."""
    num_steps: int


WORLDS: Mapping[str, World] = {
    **{
        name: World(make, mover_program.WEIGHTS, 32) for name, make in mover_program.BENCHES.items()
    },
    "cache": World(CacheProgram, cache_program.WEIGHTS, 48),
    "cache on CUDA": World(partial(CacheProgram, on_cuda=True), cache_program.WEIGHTS, 48),
}


@dataclass(frozen=True)
class Case:
    world: str
    size: int
    steps: tuple[Step, ...]
    picks: tuple[int, ...]

    def __str__(self) -> str:
        steps = "".join(f"        {step!r},\n" for step in self.steps)
        return (
            "from tests.tiers.seeds import Case, run\n\n"
            "run(\n"
            f"    Case({self.world!r}, {self.size}, (\n{steps}    ), {self.picks!r})\n"
            ")\n"
        )


class Picks:
    """The picks of a case, and the first of everything when they are used up."""

    def __init__(self, picks: Sequence[int]) -> None:
        self._picks = picks
        self.num_used = 0

    def __call__(self, n: int) -> int:
        at, self.num_used = self.num_used, self.num_used + 1
        return self._picks[at] % n if at < len(self._picks) else 0


def draw(world: str, seed: int) -> Case:
    """The case of a seed."""
    rng = Random(f"{world} {seed}")
    weights, n = WORLDS[world].weights, WORLDS[world].num_steps
    verbs = rng.choices(list(weights), list(weights.values()), k=n)
    steps = tuple(
        (verb, rng.randrange(997), rng.randrange(997), rng.randrange(997)) for verb in verbs
    )
    picks = tuple(rng.randrange(5040) for _ in range(NUM_PICKS))
    return Case(world, rng.randrange(997), steps, picks)


def run(case: Case) -> None:
    """Raises whatever is wrong."""
    program = WORLDS[case.world].make(Picks(case.picks), case.size)
    for step in case.steps:
        program.step(*step)
    program.come_to_rest()


def problem(case: Case) -> Exception | None:
    """What is wrong with a case."""
    try:
        run(case)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we are looking for
        return error
    return None


def kind(error: Exception | None) -> str | None:
    """Two problems of one kind are taken for one problem while a case is shrunk."""
    if isinstance(error, HazardError):
        return str(error).split(" on ")[0]
    return None if error is None else type(error).__name__


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A case that still fails, without the steps and picks that it fails without.

    Delta debugging (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002)
    over the steps; then picks are cut off at the end, and set to 0 where they don't matter.
    """
    steps = _fewest(case.steps, lambda steps: fails(replace(case, steps=steps)))
    case = replace(case, steps=steps)
    for length in (0, *(2**power for power in range(len(case.picks).bit_length()))):
        if fails(replace(case, picks=case.picks[:length])):
            case = replace(case, picks=case.picks[:length])
            break
    for at, pick in enumerate(case.picks):
        plain = (*case.picks[:at], 0, *case.picks[at + 1 :])
        if pick and fails(replace(case, picks=plain)):
            case = replace(case, picks=plain)
    return case


def _fewest(steps: tuple[Step, ...], fails: Callable[[tuple[Step, ...]], bool]) -> tuple[Step, ...]:
    size = max(1, len(steps) // 2)
    while steps:
        for start in range(0, len(steps), size):
            fewer = steps[:start] + steps[start + size :]
            if fails(fewer):
                steps = fewer
                break
        else:
            if size == 1:
                break
            size //= 2
    return steps


def judge(world: str, seeds: Sequence[int]) -> None:
    """Run seeds; raise `AssertionError` with the first failing case, shrunk, to be run again."""
    for seed in seeds:
        case = draw(world, seed)
        error = problem(case)
        if error is not None:
            small = shrink(case, partial(_fails_as, kind(error)))
            raise AssertionError(f"seed {seed} of {world!r}: {error}\n\n{small}") from error


def _fails_as(wanted: str | None, case: Case) -> bool:
    return kind(problem(case)) == wanted


def num_seeds(default: int) -> int:
    """`SEEDS` of the environment, or `default`."""
    return int(os.environ.get("SEEDS", default))
