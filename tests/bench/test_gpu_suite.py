"""The GPU suite's runner: what it makes of parts that work, crash, hang or talk nonsense."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from bench import gpu_suite
from bench.gpu_budget import Budget
from bench.gpu_figures import FIGURES, Verdict, at_least, at_most, lines_of, table_rows
from bench.gpu_suite import PARTS, PROBE, Outcome, Part, judge, run_process, run_suite

ROOT = Path(__file__).parents[2]


def fake(kind: str, *more: str, part: str = "layout", limit_s: float = 60.0) -> Part:
    return Part(part, ("tests.bench.gpu_fakes", kind, *more), limit_s)


def verdicts(part: Part) -> dict[str, Verdict]:
    _, lines = judge(run_process(part))
    return {line.figure.name: line.verdict for line in lines}


def test_a_value_is_judged_by_its_target() -> None:
    assert verdicts(fake("good")) == {"layout_pool_gib": Verdict.MET, "layout_loss": Verdict.SHORT}
    assert at_least(90).allows(90) and not at_least(90).allows(89.9)
    assert at_most(3).allows(3) and not at_most(3).allows(3.1)
    assert str(at_least(90)) == ">= 90 (design)"


def test_a_hit_with_other_bits_is_a_failure_and_not_a_shortfall() -> None:
    lines = lines_of("exact", {"exact_bits": 99.0}, {}, "", failed=False)
    assert lines[0].verdict is Verdict.FAILED
    lines = lines_of("tests", {"tests_failed": 1.0, "tests_passed": 3.0}, {}, "", failed=False)
    assert [line.verdict for line in lines] == [Verdict.FAILED, Verdict.MET, Verdict.SKIPPED]


def test_a_gpu_test_that_fails_fails_the_run() -> None:
    result, status = run_suite(fake("probe", part="card"), [fake("failing", part="tests")])
    assert status == 1 and result["failed"] == ["tests_failed"]


def test_a_figure_that_a_part_left_out_says_why() -> None:
    outcome, lines = judge(run_process(fake("half")))
    assert outcome.status == "measured"
    assert [(line.verdict, line.why) for line in lines] == [
        (Verdict.MET, ""),
        (Verdict.SKIPPED, "no time"),
    ]
    assert table_rows(lines)[2][1:] == ["", "%", "<= 3 (design)", "skipped", "  no time"]


def test_a_part_that_says_it_cannot_is_skipped() -> None:
    outcome, lines = judge(run_process(fake("skipped")))
    assert (outcome.status, outcome.why) == ("skipped", "no such card")
    assert {line.verdict for line in lines} == {Verdict.SKIPPED}


def test_a_part_that_crashes_shows_its_last_lines() -> None:
    outcome, lines = judge(run_process(fake("crash")))
    assert (outcome.status, outcome.why) == ("failed", "exit status 1")
    assert outcome.tail == ("half a table", "it broke")
    assert {line.verdict for line in lines} == {Verdict.FAILED}


def test_a_part_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "child"
    # Long enough for a slow machine to start it, and for nothing else.
    outcome = run_process(fake("hang", str(note), limit_s=4.0))
    assert (outcome.status, outcome.why) == ("failed", "not done in 4 s")
    assert is_gone(int(note.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended or does so within ten seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([handle], [], [], 10.0)
    os.close(handle)
    return bool(ready)


@pytest.mark.parametrize("kind", ["garbage", "nan", "strange", "text", "odd"])
def test_a_last_line_that_does_not_fit_is_a_failure(kind: str) -> None:
    outcome, lines = judge(run_process(fake(kind)))
    assert outcome.status == "failed" and "line" in outcome.why
    assert {line.verdict for line in lines} == {Verdict.FAILED}


def test_a_part_whose_libraries_are_missing_is_not_started() -> None:
    part = replace(fake("crash"), needs=("json", "no_such_library"))
    outcome, _ = judge(run_process(part))
    assert (outcome.status, outcome.why) == ("skipped", "no_such_library not installed here")


def test_one_bad_part_costs_its_own_figures_only(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [fake("crash", part="copies"), fake("good"), fake("skipped", part="ttft")]
    result, status = run_suite(fake("probe", part="card"), parts)
    assert status == 1 and result["failed"] == ["copies"]
    assert [each["status"] for each in result["parts"]] == ["failed", "measured", "skipped"]
    assert result["figures"]["layout_loss"]["value"] == 4.5
    assert result["figures"]["promote_of_pinned"]["verdict"] == "FAILED"
    told = capsys.readouterr()
    assert "name: fake" in told.out and "it broke" in told.err
    json.dumps(result, allow_nan=False)


def test_shortfalls_and_skips_are_no_failure_and_parts_get_their_budget() -> None:
    parts = [replace(fake("options"), limit_s=30.0, spare_s=10.0), fake("skipped", part="ttft")]
    result, status = run_suite(fake("probe", part="card"), parts, ("--dry",))
    assert status == 0 and result["figures"]["layout_loss"]["verdict"] == "short"
    assert result["parts"][0]["report"]["notes"] == ["--budget", "20.0", "--dry"]


@pytest.mark.parametrize(("probe", "expected"), [("no-gpu", 0), ("cpu-torch", 2), ("crash", 2)])
def test_without_a_usable_gpu_nothing_starts(probe: str, expected: int) -> None:
    result, status = run_suite(fake(probe, part="card"), [fake("crash")])
    assert status == expected
    assert result["parts"][0]["status"] == "skipped" and not result["usable"]


def test_all_parts_together_end_within_nine_minutes_and_each_has_figures() -> None:
    assert [part.name for part in PARTS] and {part.name for part in PARTS} == set(FIGURES)
    assert sum(part.limit_s for part in (PROBE, *PARTS)) < 9 * 60
    names = [figure.name for figures in FIGURES.values() for figure in figures]
    assert len(names) == len(set(names))
    for part in PARTS:
        module = part.command[0].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU: the suite would run")
def test_the_whole_suite_without_a_gpu_skips_every_part_and_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    environment = dict(os.environ, PYTHON=sys.executable)
    ended = subprocess.run(
        [str(ROOT / "bench" / "gpu_suite.sh"), "--out", str(out)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    result = json.loads(out.read_text())
    assert last["why"] == result["why"] == "no GPU on this machine"
    assert [each["status"] for each in result["parts"]] == ["skipped"] * len(PARTS)
    assert {each["verdict"] for each in result["figures"].values()} == {"skipped"}


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_the_whole_suite_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    options = ["--dry", "--out", str(out), "--directory", str(tmp_path)]
    ended = subprocess.run(
        [str(ROOT / "bench" / "gpu_suite.sh"), *options],
        env=dict(os.environ, PYTHON=sys.executable, XDG_CACHE_HOME=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(out.read_text())
    assert {each["status"] for each in result["parts"]} == {"measured"}
    assert result["dry"] and not result["failed"]


def test_a_missing_interpreter_is_one_line() -> None:
    ended = subprocess.run(
        [str(ROOT / "bench" / "gpu_suite.sh")],
        env=dict(os.environ, PYTHON="/nowhere/python"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1 and "make install" in ended.stderr


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spend(clock: Clock, walk: Iterable[str], seconds: dict[str, float]) -> list[str]:
    done = []
    for point in walk:
        clock.now += seconds[point]
        done.append(point)
    return done


def test_points_run_in_order_while_they_fit_and_smaller_ones_still_may() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    costs = {"a": 4.0, "large": 7.0, "b": 5.0, "c": 2.0}
    assert spend(clock, budget.walk(costs, costs.__getitem__), costs) == ["a", "b"]
    assert budget.dropped == ["large: 7.0 s wanted, 6.0 s left", "c: 2.0 s wanted, 1.0 s left"]
    assert budget.left == 1.0


def test_an_estimate_that_was_overrun_stretches_the_next_one_only() -> None:
    clock = Clock()
    budget = Budget(20.0, clock)
    costs = dict.fromkeys("abcde", 2.0)
    spent = {"a": 6.0, "b": 2.0, "c": 2.0, "d": 9.0, "e": 1.0}
    assert spend(clock, budget.walk(costs, costs.__getitem__), spent) == ["a", "b", "c", "d"]
    assert budget.dropped == ["e: 9.0 s wanted, 1.0 s left"]


def test_what_a_part_says_of_itself_outlives_its_judgement() -> None:
    outcome = Outcome("layout", "failed", 1.0, "exit status 3", ("last words",))
    judged, lines = judge(outcome)
    assert judged == outcome and lines[0].why == "exit status 3"
    assert gpu_suite.run_suite(fake("no-gpu", part="card"), [])[0]["figures"] == {}
