"""The doctor's runs are trained where they are asked for, `make test-doctor`: they take a minute."""

from typing import Any

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "doctor" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("doctor"):
                item.add_marker(pytest.mark.skip(reason="trains some thirty runs; `make test-doctor` runs it"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The diagnosis of each run, one line each."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [value for report in reports for name, value in report.user_properties if name == "doctor"]
    if lines:
        terminalreporter.section("what was wrong, state, findings")
        for line in lines:
            terminalreporter.write_line(line)
