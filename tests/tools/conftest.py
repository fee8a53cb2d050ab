"""A tiny model, documents, and the command line run inside the test's process."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from kvtier.tools.cli import main
from tests.tiny_model import make_tiny_model

SMALL = ("--hbm", "8MiB", "--dram", "16MiB", "--nvme", "64MiB", "--threads", "1")
"""Room enough for every test's documents, and quick to prepare, on a busy machine too."""


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """Its last line, as JSON."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def complaint(self) -> str:
        """The one line that tells the user what is wrong; fails if it is not just that."""
        lines = [line for line in self.err.splitlines() if line.startswith("kvtier: error: ")]
        assert (self.code, len(lines)) == (2, 1), self.err
        assert "Traceback" not in self.err and self.err.splitlines()[-1] == lines[0], self.err
        return lines[0]


Run = Callable[..., Said]


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """`--threads` holds for the whole process: put it back for other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `kvtier` with these arguments."""

    def run_main(*arguments: object) -> Said:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run_main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of odd shape (3 heads over 1) that takes 700 tokens."""
    quiet: Any = logging.disable_progress_bar  # untyped upstream
    quiet()
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=700)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Five documents of different length and beginning."""
    directory = tmp_path / "documents"
    directory.mkdir()
    for number, word in enumerate(("alpha", "bravo", "charlie", "delta", "echo")):
        (directory / f"{word}.txt").write_text(
            f"{word} says: the thing is here. " * (5 + 3 * number)
        )
    return directory


def command(*arguments: object) -> list[str]:
    """The real command line, for a process of its own."""
    return [sys.executable, "-P", "-m", "kvtier.tools.cli", *map(str, arguments)]
