"""Shows a prewarming run on standard error: a bar on a terminal, a line per document elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.tools.documents import Document


class TerminalWatcher:
    """A `Watcher`. Use as a context manager; the bar goes when it ends."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = console.is_terminal
        self._progress = Progress(
            TextColumn("prewarm"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._bar,
        )
        self._task = self._progress.add_task("tokens", total=None)
        self._documents = 0
        self._finished = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def started(self, documents: int) -> None:
        self._documents = documents

    def planned(self, tokens: int) -> None:
        self._progress.update(self._task, total=tokens)

    def advanced(self, tokens: int) -> None:
        self._progress.advance(self._task, tokens)

    def finished(self, document: Document, outcome: str) -> None:
        self._finished += 1
        line = f"[{self._finished}/{self._documents}] {document.id}: {outcome}"
        if self._bar:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
