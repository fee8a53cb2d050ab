"""`kvtier replay` behind its options: read, replay, compare with what is possible, report."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.index.words import TierId, Tokens
from kvtier.tools.errors import BadOption
from kvtier.tools.replay.bounds import belady, infinite
from kvtier.tools.replay.curve import Curve, spread, trace_curve
from kvtier.tools.replay.plot import draw
from kvtier.tools.replay.report import Report, numbers, show
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.world import Setup
from kvtier.tools.traces import TraceFile, TraceRequest

Bar = Callable[[str, int, int | None], None]
"""What is being done, how much of it, of how much (None: not known)."""


def run_replay(
    path: Path,
    setup: Setup,
    *,
    block_bytes: int | None,
    running: int,
    lookahead: int,
    strict: bool,
    points: int,
    processes: int,
    png: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace and print what came of it.

    `running`: requests that hold their blocks at once; `lookahead`: those behind them whose blocks
    are known; `points`: capacities of the curve, 0 for none.

    Raises `BadTrace` for a file that is none, with `strict` for a malformed line too, and
    `BadOption` for a PNG without a curve or where none can be written.
    """
    if png is not None and not points:
        raise BadOption("--png: there is no curve to draw; leave out --curve 0")
    if png is not None and not png.parent.is_dir():
        raise BadOption(f"--png: there is no directory {png.parent}; make it")
    with _bar() as bar:
        requests, bad_lines = _read(path, strict, bar)
        blocks = [request.blocks for request in requests]
        replay, hit_tokens = Replay(setup, running), Counter[TierId]()
        for n, request in enumerate(requests, 1):
            waiting = blocks[n : n + lookahead]
            sources = replay.request(request.timestamp_s, request.blocks, waiting)
            for tier, tokens in zip(sources, request.block_tokens, strict=False):
                hit_tokens[tier] += tokens
            bar("replay", n, len(requests))
        bar("Belady", 0, None)
        report = Report(
            trace=path.name,
            setup=setup,
            block_bytes=block_bytes,
            outcome=replay.outcome(),
            tokens_asked=sum(sum(request.block_tokens) for request in requests),
            tokens_hit=hit_tokens,
            ideal=infinite(blocks),
            belady=belady(blocks, setup.blocks),
            bad_lines=bad_lines,
            curve=None if not points else _curve(blocks, setup, points, processes, bar),
        )
    show(report, Console())
    if png is not None and report.curve is not None:
        draw(report, report.curve, png)
    if as_json:
        print(json.dumps(numbers(report)))


def _curve(
    requests: Sequence[Tokens], setup: Setup, points: int, processes: int, bar: Bar
) -> Curve:
    given = [n for n in (setup.hbm, setup.dram, setup.nvme) if n]
    policies = {"lru": None, **dict.fromkeys(setup.policies.values())}
    return trace_curve(
        requests,
        spread(given, points),
        list(policies),
        processes=processes,
        progress=lambda done, total: bar("curve", done, total),
    )


def _read(path: Path, strict: bool, bar: Bar) -> tuple[list[TraceRequest], tuple[int, ...]]:
    """Every request, and the numbers of malformed lines, each of which is told.

    Belady's rule knows the future, so a trace is held: some 12 bytes a block.
    """
    bad: list[int] = []
    console = Console(stderr=True)

    def complain(line: int, what: str) -> None:
        bad.append(line)
        console.print(f"{path}, line {line}: {what}", markup=False, highlight=False, soft_wrap=True)

    requests: list[TraceRequest] = []
    for request in TraceFile(path, strict=strict, complain=complain):
        requests.append(request)
        bar("read", len(requests), None)
    return requests, tuple(bad)


@contextmanager
def _bar() -> Iterator[Bar]:
    """Progress on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("read", total=None)
        yield lambda what, done, total: progress.update(
            task, description=what, completed=done, total=total
        )
