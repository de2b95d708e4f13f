"""Fault matrix: what must hold under each fault, and the table of which tests showed it.

A test is linked to a row by `@pytest.mark.row("R-07", "the fault that it makes")`. `make test-faults` runs all linked
tests and prints a line for each row; `make test-vllm` does it for the rows of the real engine.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

ROWS = {
    "R-01": "stopped at a step and resumed",
    "R-02": "resumed with other threads or versions",
    "R-03": "kill -9 at a random moment",
    "R-04": "kill -9 between two operations of a commit",
    "R-05": "a damaged file in a checkpoint",
    "R-06": "no whole checkpoint",
    "R-07": "output in use",
    "R-08": "disk full at a checkpoint",
    "R-09": "disk full at a record",
    "R-10": "too little disk at the start",
    "R-11": "SIGTERM anywhere",
    "R-12": "SIGTERM to one rank",
    "R-13": "a reward hangs",
    "R-14": "text made to slow a verifier down",
    "R-15": "a reward raises for some completions",
    "R-16": "a reward raises for all",
    "R-17": "a reward returns the wrong shape or type",
    "R-18": "a reward returns NaN, inf, None or 1e38",
    "R-19": "a reward worker dies",
    "R-20": "a reward meddles with its process",
    "R-21": "a group of equal rewards",
    "R-22": "all groups of equal rewards",
    "R-23": "everything truncated and masked",
    "R-24": "an empty completion",
    "R-25": "a prompt beyond the context, or empty",
    "R-26": "a wrong option",
    "R-27": "malformed data",
    "R-28": "padding of any value",
    "R-29": "one NaN gradient",
    "R-30": "NaN again and again, or in the weights",
    "R-31": "a gradient a million times too large",
    "R-32": "overflow in half precision",
    "R-33": "dropout left on",
    "R-34": "temperature and filters",
    "R-35": "text that tokenises otherwise than it was sampled",
    "R-36": "the sampler dies in a request",
    "R-37": "the sampler hangs, or answers nonsense",
    "R-38": "weights do not reach the sampler",
    "R-39": "the trainer dies, its helpers remain",
    "R-40": "a rank is killed",
    "R-41": "a rank hangs",
    "R-42": "a rank raises, or has fewer batches",
    "R-43": "a tracker is missing, raises or blocks",
    "R-44": "a pickle where weights should be",
    "R-45": "crafted safetensors and JSON",
    "R-46": "a model that brings code",
    "R-47": "an output that cannot be a folder",
    "R-48": "model text with control characters or markup",
    "R-49": "model code that is executed",
    "R-50": "a server or viewer open to others",
    "R-51": "Ctrl-C, broken pipes, odd terminals",
    "R-52": "export read by others",
    "R-53": "the clock jumps",
    "R-54": "a long run",
    "R-55": "two processes on one run",
}

WITHOUT_TEST = {
    "R-49": "not applicable: no reward of gruppo executes model text",
}

VLLM = "with the real engine: make test-vllm"


@dataclass
class Evidence:
    """Tests of a row by outcome, with the faults that they make."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    xfailed: list[str] = field(default_factory=list)
    """Reasons of the tests that are known to fail."""
    skipped: list[str] = field(default_factory=list)

    def line(self, row: str) -> str:
        """The line of the table: the outcome, the number of tests, and the faults that were made."""
        faults = "; ".join(dict.fromkeys(self.passed))
        if self.failed:
            outcome = f"FAILED   {'; '.join(dict.fromkeys(self.failed))}"
        elif self.xfailed:
            held = f" (holds: {faults})" if faults else ""
            outcome = f"open     {'; '.join(dict.fromkeys(self.xfailed))}{held}"
        elif self.passed:
            missing = f" (not run: {'; '.join(dict.fromkeys(self.skipped))})" if self.skipped else ""
            outcome = f"passed   {len(self.passed):3}  {faults}{missing}"
        elif self.skipped:
            outcome = f"not run  {'; '.join(dict.fromkeys(self.skipped))}"
        else:
            outcome = f"-        {WITHOUT_TEST.get(row, 'no test')}"
        return f"{row}  {ROWS[row]:50} {outcome}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", choices=("all", "seen"), help="print the fault matrix: all rows, or those that were run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(number, fault): shows a row of the fault matrix (tests/fault_matrix.py)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("row"):
            row, fault = mark.args
            if row not in ROWS:
                raise pytest.UsageError(f"{item.nodeid}: {row!r} is no row of the fault matrix")
            item.user_properties.append(("row", [row, fault]))


def evidence(stats: dict[str, list[Any]]) -> dict[str, Evidence]:
    """Tests by row, from the reports of pytest by outcome."""
    found: dict[str, Evidence] = defaultdict(Evidence)
    for outcome in ("passed", "failed", "error", "xfailed", "xpassed", "skipped"):
        for report in stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name != "row":
                    continue
                row, fault = value
                if outcome == "passed":
                    found[row].passed.append(fault)
                elif outcome == "xfailed":
                    found[row].xfailed.append(f"{fault}: {report.wasxfail}")
                elif outcome == "skipped":
                    is_vllm = "vllm" in report.nodeid.lower()
                    found[row].skipped.append(VLLM if is_vllm else str(report.longrepr[-1]))
                else:
                    found[row].failed.append(report.nodeid.rpartition("::")[2])
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    wanted = config.getoption("--rows")
    if not wanted:
        return
    found = evidence(terminalreporter.stats)
    terminalreporter.section("fault matrix")
    for row in ROWS:
        if wanted == "all" or row in found:
            terminalreporter.write_line(found.get(row, Evidence()).line(row))
