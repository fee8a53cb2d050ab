"""Starts the demo's processes, one at a time, and keeps what they say. Knows nothing of results.

Each gets the interpreter's `-P`, so that a folder of the working directory cannot stand for an
installed package, and a log file of its own for standard error.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.tools.errors import DemoFailed

STOP_TIMEOUT_S = 60.0
_ERROR = "kvtier: error: "


def run_lines(name: str, module: str, arguments: Sequence[str], logs: Path) -> Iterator[str]:
    """Run `python -m module arguments` and yield its lines as they come.

    Raises `DemoFailed` naming `name` if it fails. Closing the iterator early ends the process.
    """
    with _open(name, module, arguments, logs) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")
        if process.wait() != 0:
            raise _failure(name, process.returncode, logs)


@contextmanager
def background(
    name: str, module: str, arguments: Sequence[str], ready: str, logs: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run it until the block ends, which begins once it has printed a line that holds `ready`.

    Ended by SIGTERM. Raises `DemoFailed` if it never gets ready or does not end well.
    """
    with _open(name, module, arguments, logs) as process:
        assert process.stdout is not None
        if not any(ready in line for line in process.stdout):
            process.wait()
            raise _failure(name, process.returncode, logs)
        yield process
        process.terminate()
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{name}: did not stop within {STOP_TIMEOUT_S:.0f} s") from None
        if process.returncode != 0:
            raise _failure(name, process.returncode, logs)


@contextmanager
def _open(
    name: str, module: str, arguments: Sequence[str], logs: Path
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", module, *arguments]
    with _log(name, logs).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _log(name: str, logs: Path) -> Path:
    return logs / f"{name.replace(' ', '-')}.txt"


def _failure(name: str, code: int, logs: Path) -> DemoFailed:
    log = _log(name, logs)
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    said = lines[-1].removeprefix(_ERROR) if lines else f"exit code {code}"
    return DemoFailed(f"{name}: {said} (see {log})")
