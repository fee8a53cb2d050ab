"""The tests that need a GPU, as many as the budget has time for; those without time are counted.

python -m bench.gpu_tests [--budget SECONDS] [--dry]
"""

import pytest

from bench.gpu_budget import Budget
from bench.gpu_part import Report, Setting, run_part

PATHS = ("tests/tiers", "tests/kernels", "tests/engine")
DRY_PATHS = ("tests/tiers/test_cuda.py",)


class Clerk:
    """A pytest plugin: counts outcomes, and starts no test once the time is up."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.passed = self.skipped = self.not_run = 0
        self.failed: list[str] = []

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self._budget.left > 0:
            return None
        self.not_run += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} ({report.when})")
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} (collection)")


def measure(setting: Setting) -> Report:
    """Raises RuntimeError if pytest could not run at all."""
    clerk = Clerk(setting.budget)
    paths = DRY_PATHS if setting.gpu.dry else PATHS
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-m", "gpu and not stress"]
    code = pytest.main([*options, *paths], plugins=[clerk])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    figures = {
        "tests_failed": float(len(clerk.failed)),
        "tests_passed": float(clerk.passed),
        "tests_not_run": float(clerk.not_run),
    }
    return Report(figures, notes={"failed": clerk.failed, "skipped": clerk.skipped})


if __name__ == "__main__":
    run_part("tests", __doc__, measure)
