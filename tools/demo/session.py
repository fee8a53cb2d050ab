"""One fresh process of the demo: asks its questions and prints what it measured, line by line.

`python -m kvtier.tools.demo.session PLAN`. The model is loaded and has answered an unrelated short
prompt before anything is timed; times to first token are the engine's own.
"""

import string
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.engine.llm import LLM
from kvtier.engine.sampling import SamplingParams
from kvtier.index.errors import KvtierError
from kvtier.index.words import TierId
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.sidecar.client import observe
from kvtier.tools.demo.plan import COMPARED, Plan, Subject
from kvtier.tools.demo.raw import cached_share, measure_raw
from kvtier.tools.demo.results import Ask, Direct, Raw, Result, State, to_line
from kvtier.tools.engine import open_llm
from kvtier.tools.errors import DemoFailed
from kvtier.tools.prompt import document_prefix, full_prompt

ANSWER_TOKENS = 20
REPEATS = 3
# At least this share of a hit must come from the tier it is named after; the rest is what the
# documents share (the chat template's head), which stays in HBM.
PURE = 0.9
SHED_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Topic:
    """A document in memory, and how many of its tokens were prewarmed."""

    name: str
    text: str
    question: str
    prewarmed: int


class Session:
    """Asks about every subject of a plan.

    A timed question is one nobody has asked before: only the document is cached. (Asked again, its
    own blocks would be hits too, and fewer tokens would be computed in one state than in another.)
    A letter in front tells questions apart, so that all have the same number of tokens. No letter
    serves two sessions: a sidecar that stops writes down the questions it has heard.
    """

    def __init__(self, plan: Plan, llm: LLM) -> None:
        self._plan = plan
        self._llm = llm
        earlier = 0 if plan.session == 0 else 1 + 2 * REPEATS + (plan.session - 1) * (1 + REPEATS)
        self._letters = string.ascii_uppercase[earlier:]

    def run(self) -> Iterator[Result]:
        self._warm_up()
        for subject in self._plan.subjects:
            yield from self._about(subject)
        direct, _ = self._nvme()
        share = cached_share(self._plan.segments)
        yield Direct(self._plan.mode, self._plan.session, direct, round(share, 4))

    def _about(self, subject: Subject) -> Iterator[Result]:
        letters = iter(self._letters)
        topic = self._topic(subject)
        largest = subject == self._plan.subjects[-1]
        # In turns, so that neither always finds what the other has just read in the drive's cache.
        raw_first = self._plan.session % 2 == 1
        if largest and raw_first:
            yield self._raw(topic)
        yield self._ask(topic, State.NVME, next(letters))
        if largest and not raw_first:
            yield self._raw(topic)
        for _ in range(REPEATS):
            yield self._ask(topic, State.HBM, next(letters))
        if self._plan.session == 0:
            for _ in range(REPEATS):
                self._empty_hbm()
                yield self._ask(topic, State.DRAM, next(letters))
            self._empty_hbm()
            yield self._ask(topic, State.DRAM, COMPARED)
            yield self._ask(topic, State.HBM, COMPARED)
            yield self._ask(topic, State.COLD, COMPARED, salt=uuid.uuid4().hex)

    def _topic(self, subject: Subject) -> _Topic:
        text = Path(subject.path).read_text(encoding="utf-8")
        prefix = document_prefix(self._llm.chat_prompt, text, self._llm.layout.block_size)
        return _Topic(subject.name, text, subject.question, len(prefix))

    def _ask(self, topic: _Topic, state: State, letter: str, *, salt: str = "") -> Ask:
        question = f"{letter}. {topic.question}"
        prompt = full_prompt(self._llm.chat_prompt, topic.text, question)
        _, before = self._nvme()
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS if letter == COMPARED else 1)
        (done,) = self._llm.generate([prompt], sampling, salt=salt)
        _, after = self._nvme()
        hits = {str(tier): n for tier, n in done.hit_tokens.items()}
        due = 0 if state is State.COLD else topic.prewarmed
        if done.cached_tokens < due or hits.get(state, 0) < PURE * due or (hits and not due):
            raise DemoFailed(
                f"document {topic.name}, {self._plan.mode}: {due} tokens were due for a {state} "
                f"request, {hits or 'none'} came; run it again when the machine is less busy"
            )
        return Ask(
            document=topic.name,
            mode=self._plan.mode,
            state=state,
            session=self._plan.session,
            question=question,
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            hit_tokens=hits,
            ttft_s=done.ttft_s,
            nvme_bytes_read=after - before,
            answer=done.text,
        )

    def _raw(self, topic: _Topic) -> Raw:
        layout = self._llm.layout
        nbytes = topic.prewarmed // layout.block_size * layout.nbytes
        raw = measure_raw(self._plan.segments, nbytes)
        return Raw(self._plan.mode, self._plan.session, raw.nbytes, raw.read_s, raw.memcpy_s)

    def _empty_hbm(self) -> None:
        cache = self._llm.cache
        cache.shed(TierId.HBM, cache.clock() + SHED_TIMEOUT_S)

    def _warm_up(self) -> None:
        prompt = full_prompt(self._llm.chat_prompt, None, "Name a colour, please. " * 8)
        self._llm.generate([prompt], SamplingParams(max_tokens=4), salt=uuid.uuid4().hex)

    def _nvme(self) -> tuple[bool, int]:
        """`(reads bypass the page cache, bytes read so far)` of whoever owns the store."""
        store = self._llm.store
        if isinstance(store, NvmeTier):
            statistics = store.statistics()
            return statistics.direct, statistics.read_bytes
        numbers = observe(Path(self._plan.socket or "")).numbers
        return bool(numbers["nvme.direct"]), int(numbers["nvme.read_bytes"])


def main(plan_text: str) -> int:
    plan = Plan.from_json(plan_text)
    try:
        with open_llm(Path(plan.model), plan.tiers, plan.threads) as llm:
            for result in Session(plan, llm).run():
                print(to_line(result), flush=True)
    except KvtierError as error:
        print(f"kvtier: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
