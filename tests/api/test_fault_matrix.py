"""The table of the fault matrix: what is written for each outcome of its tests."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from fault_matrix import ROWS, WITHOUT_TEST, Evidence, evidence, pytest_collection_modifyitems


@dataclass
class Report:
    """What the table reads of a report of pytest."""

    user_properties: list[tuple[str, Any]]
    nodeid: str = "tests/faults/test_x.py::test_x"
    wasxfail: str = ""
    longrepr: tuple[Any, ...] = field(default=("file", 1, "Skipped: no engine"))


def of(row: str, fault: str, **facts: Any) -> Report:
    return Report([("row", [row, fault]), ("other", 1)], **facts)


def test_the_rows_are_numbered_without_a_gap_and_those_without_a_test_have_a_reason() -> None:
    assert list(ROWS) == [f"R-{number:02d}" for number in range(1, 56)]
    assert WITHOUT_TEST.keys() < ROWS.keys()


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        ({}, "-        no test"),
        ({"passed": [of("R-05", "a bit"), of("R-05", "a bit"), of("R-05", "a cut")]}, "passed     3  a bit; a cut"),
        (
            {"passed": [of("R-05", "a bit")], "xfailed": [of("R-05", "a cut", wasxfail="not seen")]},
            "open     a cut: not seen (holds: a bit)",
        ),
        ({"passed": [of("R-05", "a bit")], "failed": [of("R-05", "a cut")]}, "FAILED   test_x"),
        ({"skipped": [of("R-05", "a bit")]}, "not run  Skipped: no engine"),
        (
            {"passed": [of("R-05", "a bit")], "skipped": [of("R-05", "a cut")]},
            "passed     1  a bit (not run: Skipped: no engine)",
        ),
        (
            {"skipped": [of("R-05", "a bit", nodeid="tests/vllm/test_vllm_x.py::test_x")]},
            "not run  with the real engine: make test-vllm",
        ),
    ],
    ids=["nothing", "passed", "open", "failed", "skipped", "in part", "vllm"],
)
def test_the_line_of_a_row(stats: dict[str, list[Any]], line: str) -> None:
    found = evidence(stats).get("R-05", Evidence()).line("R-05")
    assert found == f"R-05  {ROWS['R-05']:50} {line}"


def test_a_row_that_is_none_is_refused() -> None:
    class Item:
        nodeid = "tests/test_x.py::test_x"

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [pytest.mark.row("R-99", "none").mark]

    with pytest.raises(pytest.UsageError, match="test_x: 'R-99' is no row of the fault matrix"):
        pytest_collection_modifyitems([Item()])  # pyright: ignore[reportArgumentType]
