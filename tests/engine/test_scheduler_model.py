"""Random workloads over small tiers with failing copies: every output is what it would be alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvtier.engine.scheduler import EngineSettings
from kvtier.index.words import TierId, Tokens
from kvtier.tiers.simulated import SimDevice, SimStore
from tests.engine.rig import make_rig

VOCABULARY = 200

asked = st.tuples(
    st.integers(0, 2),  # which document
    st.sampled_from([0, 5, 16, 33, 64, 90]),  # how much of it
    st.integers(1, 40),  # tokens of its own
    st.integers(1, 20),  # tokens to generate
)


def prompt_of(document: int, length: int, own: int) -> Tokens:
    head = np.random.default_rng(document).integers(3, VOCABULARY, 90)[:length]
    tail = np.random.default_rng(1000 + own).integers(3, VOCABULARY, own)
    return np.concatenate([head, tail]).astype(np.int32)


def alone(tiny: Path, prompt: Tokens, n: int, known: dict[bytes, list[int]]) -> list[int]:
    """The first `n` tokens; greedy, so longer outputs begin as shorter ones do."""
    key = prompt.tobytes()
    if key not in known:
        rig = make_rig(tiny)
        (known[key],) = rig.run(rig.request(prompt, 20))
    return known[key][:n]


class Known(dict[bytes, list[int]]):
    """What each prompt leads to alone, kept over the examples. Too much to be shown with one."""

    def __repr__(self) -> str:
        return f"{len(self)} prompts"


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    waves=st.lists(st.lists(asked, min_size=1, max_size=5), min_size=1, max_size=3),
    hbm=st.sampled_from([10, 11, 17, 40]),
    dram=st.sampled_from([0, 5, 24]),
    capacity=st.sampled_from([3, 12, None]),
    step_tokens=st.sampled_from([7, 32, 200]),
    seed=st.integers(0, 10_000),
    faulty=st.booleans(),
)
@example(  # one request is preempted and admitted again while a launch is planned
    waves=[[(1, 33, 1, 15)], [(0, 0, 1, 16), (0, 90, 7, 1), (0, 0, 32, 1), (0, 0, 1, 2)]],
    hbm=10,
    dram=0,
    capacity=3,
    step_tokens=200,
    seed=18,
    faulty=True,
)
def test_outputs_do_not_depend_on_company_room_or_faults(
    tiny: Path,
    known: Known,
    waves: Sequence[Sequence[tuple[int, int, int, int]]],
    hbm: int,
    dram: int,
    capacity: int | None,
    step_tokens: int,
    seed: int,
    faulty: bool,
) -> None:
    device = SimDevice(seed)
    if faulty:
        device.faults = lambda name: device.choose(5) == 0
    rig = make_rig(
        tiny,
        hbm=hbm,
        dram=dram,
        device=device,
        store=SimStore(TierId.NVME, device, capacity=capacity),
        settings=EngineSettings(step_tokens=step_tokens, max_running=4),
    )
    for wave in waves:
        requests = [rig.request(prompt_of(*each[:3]), each[3]) for each in wave]
        outputs = rig.run(*requests)
        for request, output in zip(requests, outputs, strict=True):
            assert output == alone(tiny, request.prompt, request.max_tokens, known)
        rig.expect_idle()
