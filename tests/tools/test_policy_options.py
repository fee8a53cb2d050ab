"""`--hbm-policy` and `--dram-policy` reach the tiers they name; a wrong name reaches nobody."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtier.index.policies import make_policy
from kvtier.index.policy import EvictionPolicy
from kvtier.index.tree import Node
from kvtier.tiers.sidecar.backend import Backend
from kvtier.tiers.sidecar.wire import WireLayout
from kvtier.tools import options
from kvtier.tools.errors import BadOption
from tests.sidecar.rig import LAYOUT, SLOT_BYTES
from tests.tools.conftest import SMALL, Run

ASK = ("generate", "--model", "m", "--prompt", "Hi")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The policies that caches are made with, and for how many blocks."""
    seen: dict[str, int] = {}

    def recorded(name: str, capacity: int, block_size: int) -> EvictionPolicy[Node]:
        seen[name] = capacity
        return make_policy(name, capacity, block_size)

    monkeypatch.setattr("kvtier.tiers.cache.make_policy", recorded)
    return seen


def test_an_engine_takes_one_for_each_of_its_pools(
    run: Run, tiny: Path, tmp_path: Path, made: dict[str, int]
) -> None:
    about = ["generate", "--model", tiny, "--prompt", "Hi", "--max-tokens", "1"]
    place = ["--store", tmp_path / "store", *SMALL]
    assert run(*about, *place, "--hbm-policy", "arc", "--dram-policy", "adaptive").code == 0
    assert made["arc"] * 2 == pytest.approx(made["adaptive"], rel=0.1), "HBM, and twice as much"
    made.clear()
    assert run(*about, *SMALL).code == 0
    assert list(made) == ["lru"]


def test_a_sidecar_takes_the_one_for_dram(made: dict[str, int]) -> None:
    async def build() -> None:
        backend = Backend(
            None,
            dram_bytes=8 * SLOT_BYTES,
            nvme_bytes=0,
            after_news=lambda: None,
            dram_policy="arc",
        )
        await backend.slab_for(WireLayout.of(LAYOUT))
        await backend.close(0.0)

    asyncio.run(build())
    assert made == {"arc": 8}


def test_serve_hands_it_to_the_sidecar(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def server(*arguments: Any, **options: Any) -> None:
        raise BadOption(f"a server with {options['dram_policy']}, {options['nvme_admission']}")

    monkeypatch.setattr("kvtier.tools.serve.SidecarServer", server)
    serve = ("serve", "--socket", "s", "--dram", "16MiB")
    chosen = ("--dram-policy", "adaptive", "--nvme-admission", "learned")
    assert "a server with adaptive, learned" in run(*serve, *chosen).complaint
    assert "a server with lru, all" in run(*serve).complaint


@pytest.mark.parametrize(
    "words",
    [
        (*ASK, "--hbm-policy"),
        (*ASK, "--dram-policy"),
        ("serve", "--socket", "s", "--dram-policy"),
    ],
)
def test_a_policy_there_is_not_is_named_with_those_there_are(run: Run, words: list[str]) -> None:
    complaint = run(*words, "mru").complaint
    assert f"{words[-1]}: 'mru' given, want one of lru, arc, adaptive" in complaint


def test_the_policy_of_a_sidecars_memory_is_the_sidecars_business(run: Run) -> None:
    assert (
        "give it to kvtier serve"
        in run(*ASK, "--socket", "s", "--dram-policy", "adaptive").complaint
    )


def test_an_admission_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(BadOption, match="--nvme-admission: 'some' given, want all or learned"):
        options.admission("some")
    assert options.admission("learned") == "learned"
