"""The demo from end to end: fetch, prewarm, restart, ask, measure, show.

Everything that computes runs in a process of its own, so that every first question finds an empty
memory and a store that another process has written.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from kvtier.engine.tokenizer import Tokenizer
from kvtier.tools.demo.documents import DemoDocument, demo_documents
from kvtier.tools.demo.plan import DRAM_BYTES, HBM_BYTES, NVME_BYTES, Plan, Subject
from kvtier.tools.demo.processes import background, run_lines
from kvtier.tools.demo.report import draw, show
from kvtier.tools.demo.results import Ask, Mode, Result, from_line
from kvtier.tools.demo.summary import summarise
from kvtier.tools.errors import DemoFailed
from kvtier.tools.model import MODEL_NAME, fetch_model

SESSIONS = 3
"""Fresh processes of each mode: an NVMe hit after a restart is measured once in each."""

CHART = "ttft.png"
_CLI = "kvtier.tools.cli"


def run_demo(work: Path, model: Path | None, threads: int | None) -> None:
    """Run the demo in `work` and print what it found, one JSON line last.

    `demo-store` in `work` is made anew each time; the model is fetched once. Raises `DemoFailed`
    if a process fails or answers differ.
    """
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    notes = _Notes()
    name = MODEL_NAME if model is None else model.resolve().name
    if model is None:
        model = fetch_model(work / "model", progress=notes.say)
    subjects = _write_documents(work / "documents", model)
    plan = Plan(
        model=str(model),
        threads=threads or len(os.sched_getaffinity(0)),
        mode=Mode.EMBEDDED,
        session=0,
        subjects=tuple(subjects),
        store=str(work / "demo-store"),
    )
    notes.say(_prewarm(plan, work / "documents", logs))
    results = [_noted(result, notes) for result in _measure(plan, logs, notes)]
    notes.say(_check(plan, logs))
    summary = summarise(name, results)
    console = Console()
    show(summary, console)
    draw(summary, work / CHART)
    console.print(f"chart: {work / CHART}", highlight=False)
    print(json.dumps(summary.as_json()), flush=True)
    if not summary.answers_identical:
        raise DemoFailed("answers differ between tiers: a cache must never change them; report it")


def _measure(plan: Plan, logs: Path, notes: "_Notes") -> Iterator[Result]:
    """Every process in turn: transformers alone, then each mode in fresh processes."""
    notes.say("transformers: prefill of the same prompts")
    for line in run_lines("transformers", "kvtier.tools.demo.baseline", [plan.to_json()], logs):
        yield from_line(line)
    for session in range(SESSIONS):
        notes.say(f"embedded: fresh process {session + 1} of {SESSIONS}")
        yield from _ask(plan.restarted(Mode.EMBEDDED, session), logs)
    with tempfile.TemporaryDirectory(prefix="kvtier-") as directory:
        for session in range(SESSIONS):
            notes.say(f"sidecar: fresh server and engine {session + 1} of {SESSIONS}")
            socket = Path(directory) / "socket"
            serve = ["serve", "--socket", str(socket), "--store", plan.store]
            serve += ["--dram", str(DRAM_BYTES), "--nvme", str(NVME_BYTES)]
            with background("kvtier serve", _CLI, serve, "ready", logs):
                yield from _ask(plan.restarted(Mode.SIDECAR, session, socket), logs)


def _ask(plan: Plan, logs: Path) -> Iterator[Result]:
    name = f"{plan.mode} engine {plan.session + 1}"
    for line in run_lines(name, "kvtier.tools.demo.session", [plan.to_json()], logs):
        yield from_line(line)


def _write_documents(directory: Path, model: Path) -> list[Subject]:
    tokenizer = Tokenizer(model)
    documents = demo_documents(lambda text: len(tokenizer.encode(text, special=False)))
    directory.mkdir(exist_ok=True)
    return [_write(document, directory) for document in documents]


def _write(document: DemoDocument, directory: Path) -> Subject:
    path = directory / f"{document.name}.txt"
    path.write_text(document.text, encoding="utf-8")
    return Subject(document.name, str(path), document.question)


def _prewarm(plan: Plan, documents: Path, logs: Path) -> str:
    """Fill a new store from the documents, offline; returns a line about it."""
    shutil.rmtree(plan.store, ignore_errors=True)
    arguments = ["prewarm", str(documents), "--model", plan.model, "--store", plan.store, "--json"]
    arguments += ["--threads", str(plan.threads), "--hbm", str(HBM_BYTES)]
    arguments += ["--dram", str(DRAM_BYTES), "--nvme", str(NVME_BYTES)]
    done = _last_json(run_lines("kvtier prewarm", _CLI, arguments, logs), "kvtier prewarm")
    return (
        f"prewarmed {done['computed']} documents: {done['tokens_computed']:,} tokens, "
        f"{done['blocks_written']:,} blocks in {done['seconds']:.1f} s"
    )


def _check(plan: Plan, logs: Path) -> str:
    done = _last_json(
        run_lines("kvtier check", _CLI, ["check", plan.store, "--json"], logs), "kvtier check"
    )
    return f"kvtier check: {done['records']:,} records, {done['blocks']:,} blocks, all well"


def _last_json(lines: Iterator[str], name: str) -> dict[str, float]:
    said: Sequence[str] = list(lines)
    if not said:
        raise DemoFailed(f"{name}: said nothing; run it by hand")
    found: dict[str, float] = json.loads(said[-1])
    return found


def _noted(result: Result, notes: "_Notes") -> Result:
    if isinstance(result, Ask):
        hits = ", ".join(f"{tier} {n}" for tier, n in result.hit_tokens.items()) or "no hits"
        notes.say(f"  {result.document} {result.state}: {result.ttft_s:.3f} s ({hits})")
    return result


class _Notes:
    """Lines on standard error with the seconds since the start: the demo takes minutes."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        seconds = time.monotonic() - self._started
        self._console.print(f"{seconds:6.1f} s  {line}", markup=False, highlight=False)
