"""Everything that only a GPU can tell, in one command and under nine minutes.

Each part is a process of its own with a time of its own, so that one that crashes, hangs or loses
the device costs its own figures and nobody else's. Ends with one table (figure, value, target,
verdict) and one JSON line; `--out` gets the same with every part's grid. Knows how parts are run
and judged, not what they measure; needs nothing beyond Python's own library.

Exit status: 0 also where a figure is short or a part skipped; 1 if a part failed, a GPU test did,
or a hit had other bits than a miss; 2 if a GPU is there that this Python cannot use.

    bench/gpu_suite.sh [--out FILE] [--only PART ...] [--directory DIR]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_figures import FIGURES, Line, Verdict, lines_of, table_rows
from bench.harness import emit, note, table

ROOT = Path(__file__).parents[1]
TAIL = 12
"""Last lines that are told of a part that failed."""


@dataclass(frozen=True)
class Part:
    """`limit_s`: after that it is killed. `spare_s` of it go to starting Python and ending."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    spare_s: float = 8.0


@dataclass(frozen=True)
class Outcome:
    """`status`: "measured", "skipped" or "failed"; `report`: the part's JSON line, if measured."""

    part: str
    status: str
    seconds: float
    why: str = ""
    tail: tuple[str, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)


_STORAGE = ("aiofiles", "lmdb", "msgspec", "numpy", "xxhash", "zstandard")
_ENGINE = (*_STORAGE, "safetensors", "transformers")
_TESTS = ("hypothesis", "pytest", "pytest_asyncio", "pytest_timeout")

PROBE = Part("card", ("bench.gpu",), 25, ("torch", "triton"))

PARTS = tuple(
    Part(name, (f"bench.gpu_{name}",), limit_s, ("torch", "triton", *needs))
    for name, limit_s, needs in (
        ("exact", 50.0, _ENGINE),
        ("bandwidth", 25.0, ()),
        ("attention", 105.0, ()),
        ("lengths", 45.0, ()),
        ("layout", 40.0, ()),
        ("prefill", 40.0, ()),
        ("copies", 50.0, _STORAGE),
        ("ttft", 65.0, _ENGINE),
        ("tests", 85.0, (*_ENGINE, *_TESTS)),
    )
)
"""Most important first where the order matters to who watches; together under nine minutes."""


def run_process(part: Part, options: Sequence[str] = ()) -> Outcome:
    """Run one part to its end or its limit. Never raises for what the part does."""
    missing = [name for name in part.needs if find_spec(name) is None]
    if missing:
        return Outcome(part.name, "skipped", 0.0, f"{', '.join(missing)} not installed here")
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", *part.command, *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=ROOT,
            env=_environment(dry="--dry" in options),
            start_new_session=True,  # so that whatever it started ends with it
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        seconds = time.monotonic() - begin
        told, complained = _lines(out), _lines(err)
    tail = (*told[-TAIL:], *complained[-TAIL:])
    if code is None:
        return Outcome(part.name, "failed", seconds, f"not done in {part.limit_s:g} s", tail)
    if code != 0:
        why = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        return Outcome(part.name, "failed", seconds, why, tail)
    report = _report(told[-1] if told else "")
    if report is None:
        return Outcome(part.name, "failed", seconds, "its last line is no JSON object", tail)
    return Outcome(part.name, "measured", seconds, "", (), report)


def judge(outcome: Outcome) -> tuple[Outcome, list[Line]]:
    """What a part's line says of each of its figures; a line that does not fit is a failure."""
    status, why, report = outcome.status, outcome.why, outcome.report
    if status == "measured":
        try:
            if report["status"] == "skipped":
                status, why = "skipped", str(report["why"])
            elif report["status"] != "measured":
                raise ValueError(f"status {report['status']!r}")
            figures = {str(k): float(v) for k, v in report.get("figures", {}).items()}
            skips = {str(k): str(v) for k, v in report.get("skips", {}).items()}
            lines = lines_of(outcome.part, figures, skips, why, failed=False)
            done = Outcome(outcome.part, status, outcome.seconds, why, (), report)
            return done, lines
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            status, why = "failed", f"its JSON line does not fit: {error}"
    failed = status == "failed"
    lines = lines_of(outcome.part, {}, {}, why, failed=failed)
    return Outcome(outcome.part, status, outcome.seconds, why, outcome.tail, report), lines


def run_suite(
    probe: Part, parts: Sequence[Part], options: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """The whole result and the exit status; prints the table."""
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    dry = "--dry" in options
    found = run_process(probe)
    known: dict[str, Any] = {
        "usable": False,
        "broken": found.status != "measured",
        "why": found.why,
        "card": {},
    }
    known |= found.report
    usable = bool(known["usable"]) or dry
    if not usable:
        note(f"gpu_suite: {known['why']}")
    outcomes, lines = [], list[Line]()
    for part in parts:
        if usable:
            budget = str(max(1.0, part.limit_s - part.spare_s))
            outcome = run_process(part, ("--budget", budget, *options))
        else:
            outcome = Outcome(part.name, "skipped", 0.0, str(known["why"]))
        judged, told = judge(outcome)
        outcomes.append(judged)
        lines += told
        note(f"{judged.part}: {judged.status} in {judged.seconds:.0f} s {judged.why}".rstrip())
        for each in judged.tail:
            note(f"    {each}")
    card: dict[str, object] = known["card"]
    for key, value in card.items():
        print(f"{key}: {value}")
    table(table_rows(lines))
    if dry:
        note("gpu_suite: a dry run: every part was executed, and the figures mean nothing")
    failed = [each.part for each in outcomes if each.status == "failed"]
    failed += [
        line.figure.name
        for line in lines
        if line.verdict is Verdict.FAILED and line.value is not None
    ]
    result = {
        "bench": "gpu_suite",
        "begun": begun,
        "commit": _commit(),
        "dry": dry,
        "seconds": round(sum(each.seconds for each in outcomes) + found.seconds, 1),
        "card": card,
        "usable": usable,
        "why": known["why"],
        "failed": failed,
        "figures": {
            line.figure.name: {
                "value": line.value,
                "unit": line.figure.unit,
                "target": line.figure.target and str(line.figure.target),
                "verdict": line.verdict.value,
                "why": line.why,
            }
            for line in lines
        },
        "parts": [asdict(each) for each in outcomes],
    }
    return result, 1 if failed else 2 if known["broken"] and not usable else 0


def _environment(*, dry: bool) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.pop("TRITON_INTERPRET", None)
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of the part's session; a child it forgot would hold the device."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _lines(file: Any) -> list[str]:
    file.seek(0)
    text: str = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _report(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no figure")


def _commit() -> str:
    try:
        told = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_suite.json"), metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), metavar="PART", default=None)
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; times are void")
    options = parser.parse_args()
    parts = [each for each in PARTS if options.only is None or each.name in options.only]
    passed = ["--directory", str(options.directory.resolve())] + ["--dry"] * options.dry
    result, status = run_suite(PROBE, parts, passed)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    note(f"gpu_suite: {options.out} written")
    values = {name: each["value"] for name, each in result["figures"].items()}
    emit(result | {"figures": values, "parts": [each["part"] for each in result["parts"]]})
    sys.exit(status)


if __name__ == "__main__":
    main()
