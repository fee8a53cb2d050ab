"""Sidecar processes and engines that end with their test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sidecar.rig import Engine, RawClient, Sidecar

StartSidecar = Callable[..., Sidecar]
Join = Callable[..., Engine]
Speak = Callable[[Sidecar], RawClient]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def sidecar_with(tmp_path: Path, closing: ExitStack) -> StartSidecar:
    def start(**options: object) -> Sidecar:
        sidecar = Sidecar(tmp_path, **options)  # type: ignore[arg-type]
        closing.callback(sidecar.close)
        return sidecar.start()

    return start


@pytest.fixture
def sidecar(sidecar_with: StartSidecar) -> Sidecar:
    return sidecar_with()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One process for all tests of a module that leave it as it was."""
    sidecar = Sidecar(tmp_path_factory.mktemp("shared"))
    try:
        yield sidecar.start()
    finally:
        sidecar.close()


@pytest.fixture
def join(closing: ExitStack) -> Join:
    def beside(sidecar: Sidecar, **options: float) -> Engine:
        engine = Engine.beside(sidecar, **options)  # type: ignore[arg-type]
        closing.callback(engine.close)
        return engine

    return beside


@pytest.fixture
def speak(closing: ExitStack) -> Speak:
    def greeted(sidecar: Sidecar) -> RawClient:
        client = RawClient.greeted(sidecar.socket)
        closing.callback(client.close)
        return client

    return greeted
