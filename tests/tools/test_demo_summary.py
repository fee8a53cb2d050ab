"""From measurements to the demo's numbers: which ask counts for which number."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.tools.demo.plan import Plan, Subject
from kvtier.tools.demo.report import draw, show
from kvtier.tools.demo.results import (
    Ask,
    Baseline,
    Direct,
    Mode,
    Raw,
    Result,
    State,
    from_line,
    to_line,
)
from kvtier.tools.demo.summary import DemoSummary, summarise

PROMPT, CACHED = 107, 96


def ask(state: State, seconds: float, letter: str, session: int = 0, **changes: object) -> Ask:
    made = Ask(
        document="4k",
        mode=Mode.EMBEDDED,
        state=state,
        session=session,
        question=f"{letter}. What?",
        prompt_tokens=PROMPT,
        cached_tokens=0 if state is State.COLD else CACHED,
        hit_tokens={} if state is State.COLD else {str(state): CACHED},
        ttft_s=seconds,
        nvme_bytes_read=700 if state is State.NVME else 0,
        answer=f"answer to {letter}",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def results(*more: Result) -> list[Result]:
    """One document, one mode, two processes."""
    first = [ask(State.NVME, 0.5, "A"), *(ask(State.HBM, 0.2, letter) for letter in "BCD")]
    first += [ask(State.DRAM, 9, "E"), ask(State.DRAM, 1, "F"), ask(State.DRAM, 2, "G")]
    first += [ask(State.DRAM, 0.01, "A"), ask(State.HBM, 0.01, "A"), ask(State.COLD, 8.0, "A")]
    second = [ask(State.NVME, 0.7, "H", 1), *(ask(State.HBM, 0.1, x, 1) for x in "IJK")]
    raws = [Raw(Mode.EMBEDDED, 0, 700, 0.2, 0.07), Raw(Mode.EMBEDDED, 1, 700, 0.2, 0.1)]
    checks = [Direct(Mode.EMBEDDED, n, True, 0.0) for n in (0, 1)]
    return [Baseline("4k", PROMPT, 7.0), *first, *second, *raws, *checks, *more]


def summary(*more: Result) -> DemoSummary:
    return summarise("model", results(*more))


def test_hits_are_timed_by_questions_nobody_has_asked_before() -> None:
    (row,) = summary().rows
    assert row.ttft_s == {State.COLD: 8.0, State.NVME: 0.6, State.DRAM: 2, State.HBM: 0.2}
    assert row.cold_s == 7.0
    assert row.shown[State.NVME].nvme_bytes_read == 700


def test_a_restore_is_held_against_raw_reads_in_the_same_process() -> None:
    # (0.2 + 0.07) / (0.5 - 0.2) and (0.2 + 0.1) / (0.7 - 0.1): the median of 0.9 and 0.5.
    assert summary().restore_vs_raw == pytest.approx(0.7)


def test_raw_reads_of_other_sizes_are_scaled() -> None:
    scaled = [
        replace(each, nbytes=1400, read_s=2 * each.read_s, memcpy_s=2 * each.memcpy_s)
        if isinstance(each, Raw)
        else each
        for each in results()
    ]
    assert summarise("model", scaled).restore_vs_raw == pytest.approx(0.7)


def test_a_hit_that_computed_fewer_tokens_is_not_compared_with_a_restore() -> None:
    odd = ask(State.HBM, 1e-6, "Z", 1, cached_tokens=CACHED + 1)
    assert summary(odd, odd, odd, odd).restore_vs_raw == pytest.approx(0.7)


def test_the_hit_ratio_leaves_cold_requests_out() -> None:
    assert summary().hit_ratio == pytest.approx(CACHED / PROMPT)


def test_one_answer_that_differs_in_the_other_mode_is_seen() -> None:
    assert summary().answers_identical
    other = ask(State.HBM, 0.2, "B", mode=Mode.SIDECAR, answer="something else")
    both = [replace(r, mode=Mode.SIDECAR) for r in results() if isinstance(r, Ask)]
    assert not summarise("model", [*results(), *both, other]).answers_identical


@pytest.mark.parametrize(("asked", "share"), [(False, 0.0), (True, 0.03)])
def test_reads_through_the_page_cache_are_not_called_direct(asked: bool, share: float) -> None:
    assert summary().direct
    assert not summary(Direct(Mode.SIDECAR, 0, asked, share)).direct


def test_the_last_line_has_the_promised_fields() -> None:
    found = summary().as_json()
    assert list(found) == ["model", "direct", "restore_vs_raw", "hit_ratio", "documents"]
    documents = found["documents"]
    assert isinstance(documents, list)
    assert set(documents[0]) == {
        "document",
        "tokens",
        "mode",
        "ttft_hf_s",
        "ttft_cold_s",
        "ttft_nvme_s",
        "ttft_dram_s",
        "ttft_hbm_s",
        "nvme_bytes_read",
        "answers_identical",
    }


@pytest.mark.parametrize("result", results()[:2] + results()[-3:], ids=lambda r: type(r).__name__)
def test_a_result_survives_its_way_between_processes(result: Result) -> None:
    assert from_line(to_line(result)) == result


def test_a_plan_survives_its_way_to_another_process() -> None:
    subjects = (Subject("1k", "a.txt", "Who?"), Subject("3k", "b.txt", "Where?"))
    plan = Plan("model", 3, Mode.SIDECAR, 1, subjects, "store", "socket")
    assert Plan.from_json(plan.to_json()) == plan


def test_the_report_fits_80_columns_and_says_what_missed_its_limit() -> None:
    screen = io.StringIO()
    show(summary(), Console(width=80, file=screen))
    text = screen.getvalue()
    assert "NVMe hit 8.6%, over 7%" in text and "HBM hit 2.9%" in text
    table = text[: text.index("4k, embedded")]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table and "speed-up" in table


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "ttft.png"
    draw(summary(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
