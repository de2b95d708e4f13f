"""Bytes of collectives that ranks really make, against the formula of docs/distributed.md."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "communication.py"
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    out = tmp_path_factory.mktemp("counts") / "counts.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-2000:]
    return {(row["case"], row["ranks"]): row for row in json.loads(out.read_text())}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["full", "exact", "recomputed", "bfloat16", "kl", "lora", "lora, kl"])
def test_the_formula_is_what_an_update_sends(case: str, world: int, counts: dict[tuple[str, int], Any]) -> None:
    row = counts[case, world]
    for part, expected in row["formula"].items():
        assert row["sent"][part] == pytest.approx(expected, rel=0.01), part
    assert row["sent"]["other"] < 0.001 * row["sent"]["gathered"]
    # 5 groups of weights (4 blocks and the rest), reduced once a micro-batch each
    reductions = row["calls"].get("all-to-all" if case == "exact" else "reduce-scatter")
    assert reductions == (4 if case.startswith("lora") else 5) * row["rounds"]


def test_two_ranks_by_hand(counts: dict[tuple[str, int], Any]) -> None:
    """A block: 3 squares of 96 (query, output, key with value), 3 times 96 x 192, 2 norms. Outside: 480 rows of 96."""
    block, outside = 96 * 96 * 3 + 96 * 192 * 3 + 2 * 96, 480 * 96 + 96
    sent = counts["full", 2]["sent"]
    # 16 micro-batches on 2 ranks; of float32 each sends half
    assert sent["gathered"] == pytest.approx(8 * 2 * (outside + 8 * block), rel=1e-3)
    assert sent["reduced"] == pytest.approx(8 * 2 * (outside + 4 * block), rel=1e-3)
