"""How a part of the GPU suite starts and reports: the options all take, the JSON line all end with.

python -m bench.gpu_PART [--budget SECONDS] [--directory DIR] [--dry]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu import Gpu, NoGpu, open_gpu
from bench.gpu_budget import Budget
from bench.harness import emit, table


@dataclass(frozen=True)
class Setting:
    """Where a part runs, how long it may, and where it may put files."""

    gpu: Gpu
    budget: Budget
    directory: Path


@dataclass(frozen=True)
class Report:
    """`figures` by their names in `bench.gpu_figures`; `skips`: why the others are not there.

    `rows`: a table, its heading first. `notes`: whatever else belongs into the JSON.
    """

    figures: dict[str, float]
    skips: dict[str, str] = field(default_factory=dict)
    rows: list[list[object]] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)


def run_part(
    part: str,
    about: str | None,
    measure: Callable[[Setting], Report],
    arguments: Sequence[str] | None = None,
) -> None:
    """Measure, or say why not; print the table and, last, the JSON line."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--directory", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; times are void")
    options = parser.parse_args(arguments)
    budget = Budget(options.budget)
    try:
        gpu = open_gpu(dry=options.dry)
    except NoGpu as error:
        emit({"bench": f"gpu_{part}", "status": "skipped", "why": str(error)})
        return
    report = measure(Setting(gpu, budget, options.directory))
    if report.rows:
        table(report.rows)
    for each in budget.dropped:
        print(f"dropped {each}")
    emit(
        {
            "bench": f"gpu_{part}",
            "status": "measured",
            "why": "",
            "figures": report.figures,
            "skips": report.skips,
            "rows": report.rows,
            "notes": report.notes,
            "dropped": budget.dropped,
        }
    )
