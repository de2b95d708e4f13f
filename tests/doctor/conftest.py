"""A table of the doctor's runs after their tests."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The diagnosis of each run, one line each."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [value for report in reports for name, value in report.user_properties if name == "doctor"]
    if lines:
        terminalreporter.section("what was wrong, state, findings")
        for line in lines:
            terminalreporter.write_line(line)
