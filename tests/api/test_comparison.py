"""The comparison page: every cell is filled, its versions are those that are measured, its numbers are the code's."""

import re
from pathlib import Path

from gruppo.advantage.estimator import ADVANTAGES
from gruppo.loss import LOSSES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
TABLES = re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
CELLS = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in TABLES[1].splitlines()]
ROWS = {row[0].strip("| "): row[1:] for row in CELLS[2:] if not row[0].startswith("**")}


def test_every_row_answers_for_every_trainer():
    assert CELLS[0][1:] == ["gruppo", "TRL", "Unsloth", "verl", "prime-rl + verifiers", "Open Instruct", "Twinkle"]
    assert len(ROWS) > 35
    assert {name for name, row in ROWS.items() if len(row) != 7 or not all(row)} == set()
    assert not re.search(r"not checked|not found|unknown|\?", TABLES[1])


def test_the_rows_that_gruppo_loses_are_there():
    lost = [name for name, row in ROWS.items() if row[0].startswith(("no", "refused"))]
    assert len(lost) >= 8
    for word in ("images", "distillation", "sequence parallel", "package index", "to the bit", "SGLang"):
        assert any(word in name for name in lost), word


def test_the_versions_of_the_head_are_those_that_benchmarks_measure():
    versions = dict(re.findall(r"^\| \[([\w-]+)\].*?\| (.*?) \|", TABLES[0], re.M))
    peers = (ROOT / "benchmarks" / "setup_peers.sh").read_text(encoding="utf-8")
    measured = dict(re.findall(r"(trl|twinkle-kit)==([\d.]+)", peers))
    assert versions["TRL"] == measured["trl"] and versions["Twinkle"] == f"twinkle-kit {measured['twinkle-kit']}"
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"twinkle-kit {measured['twinkle-kit']} and trl {measured['trl']} " in benchmarks


def test_the_numbers_of_gruppo_are_those_of_the_code():
    assert ROWS["named losses"][0] == f"[{len(LOSSES)}](losses.md#the-variants)"
    assert ROWS["advantages by name"][0] == str(len(ADVANTAGES))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(LOSSES)} losses by name and {len(ADVANTAGES)} advantages" in readme


def test_trl_is_not_accused_of_more_than_bnpo():
    """Its `_compute_loss` was run over 1, 2, 4 and 8 micro-batches: all other losses give one gradient."""
    assert ROWS["gradient independent of micro-batches"][:2] == ["yes, tested", "[all but `bnpo`](#micro-batches)"]
