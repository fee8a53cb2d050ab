"""Generated traces that are hard on eviction rules, each in its own way; seeded and endless.

Production traces are few and somebody has looked at them. These are here so that a rule which wins
on those is also seen where it might lose. A workload yields the contents of a request's blocks;
`chained` numbers them as traces do, equal ids for equal prefixes. Knows no policy and no capacity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

import numpy as np

from kvtier.index.words import Tokens

Workload = Iterator[list[int]]


class Contents:
    """Content ids that nobody has used yet."""

    def __init__(self) -> None:
        self._next = count()

    def fresh(self, n: int) -> list[int]:
        return list(islice(self._next, n))


def scan(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """Documents read once, and favourites that come back more rarely than recency can wait for."""
    favourites = [new.fresh(8) for _ in range(6 * scale)]
    while True:
        once = rng.random() < 0.75
        yield new.fresh(int(rng.integers(4, 17))) if once else favourites[rng.integers(6 * scale)]


def loop(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """The same documents round and round."""
    documents = [new.fresh(10) for _ in range(80 * scale)]
    while True:
        yield from documents


def documents(rng: np.random.Generator, new: Contents, scale: int, drift: int = 0) -> Workload:
    """A system prompt, a document of skewed popularity, a question. Every `drift` requests a tenth
    of the catalogue changes its popularity."""
    prompt = new.fresh(2)
    shelf = [new.fresh(int(rng.integers(8, 25))) for _ in range(300 * scale)]
    weights = np.arange(1, len(shelf) + 1) ** -0.95
    order = np.arange(len(shelf))
    for turn in count(1):
        if drift and turn % drift == 0:
            order = np.roll(order, len(shelf) // 10)
        which = order[rng.choice(len(shelf), p=weights / weights.sum())]
        yield prompt + shelf[which] + new.fresh(1)


def drifting(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """`documents` whose popularity moves."""
    return documents(rng, new, scale, drift=100 * scale)


def one_shot(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """A long system prompt shared by all; each document is asked about once, some once more soon
    after."""
    prompt = new.fresh(20)
    recent: list[list[int]] = []
    while True:
        again = bool(recent) and rng.random() < 0.25
        document = recent.pop(rng.integers(len(recent))) if again else new.fresh(12)
        if not again:
            recent = [*recent[-2 * scale :], document]
        yield prompt + document + new.fresh(1)


def agents(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """Interleaved sessions that re-send a growing context at every step."""
    prompt = new.fresh(10)
    sessions = [list(prompt) for _ in range(2 * scale)]
    while True:
        which = int(rng.integers(len(sessions)))
        if rng.random() < 1 / 60:
            sessions[which] = list(prompt)
        sessions[which] = sessions[which] + new.fresh(int(rng.integers(1, 6)))
        yield sessions[which]


def chats(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """Conversations: after each turn a coin decides whether there is another one, later."""
    waiting: list[list[int]] = []
    while True:
        due = len(waiting) > 10 * scale
        chat = waiting.pop(rng.integers(len(waiting))) if due else new.fresh(2)
        chat = chat + new.fresh(int(rng.integers(2, 12)))
        if rng.random() < 0.6:
            waiting.append(chat)
        yield chat


def mixture(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """Chats, documents, agents and a scan at the same time."""
    parts = [make(rng, new, scale) for make in (chats, documents, agents, scan)]
    while True:
        yield next(parts[rng.integers(len(parts))])


def phases(rng: np.random.Generator, new: Contents, scale: int) -> Workload:
    """The same one after another, again and again."""
    parts = [make(rng, new, scale) for make in (documents, agents, scan, chats)]
    while True:
        for part in parts:
            yield from islice(part, 100 * scale)


WORKLOADS: dict[str, Callable[[np.random.Generator, Contents, int], Workload]] = {
    make.__name__: make
    for make in (
        scan,
        loop,
        documents,
        drifting,
        one_shot,
        agents,
        chats,
        mixture,
        phases,
    )
}


def chained(requests: Iterable[Sequence[int]]) -> tuple[Tokens, ...]:
    """Block ids of each request: int32, numbered in order of first appearance."""
    numbers: dict[tuple[int, int], int] = {}
    traced = []
    for contents in requests:
        ids, above = [], -1
        for content in contents:
            above = numbers.setdefault((above, content), len(numbers))
            ids.append(above)
        traced.append(np.array(ids, np.int32))
    return tuple(traced)


def generate(name: str, num_requests: int, *, seed: int = 0, scale: int = 10) -> tuple[Tokens, ...]:
    """The first requests of a workload. `scale` grows the working set; 10 is a few thousand to a
    few ten thousand blocks. Raises `KeyError` for a name that is not in `WORKLOADS`."""
    rng = np.random.default_rng(seed)
    return chained(islice(WORKLOADS[name](rng, Contents(), scale), num_requests))
