"""`gruppo eval --sampler vllm` scores the completions that the trainer's own sampler draws."""

from pathlib import Path

import pyarrow.parquet
import pytest

from gruppo.cli.main import run


@pytest.mark.parametrize("sampler", ["vllm", "vllm:start"])
def test_greedy_completions_and_scores_are_those_of_torch(sampler: str, tmp_path: Path) -> None:
    tables = []
    for name in ("torch", sampler):
        file = tmp_path / f"{name.replace(':', '_')}.parquet"
        words = ["--limit", "32", "--max-new-tokens", "4", "--sampler", name, "--output", str(file)]
        assert run(["eval", *words]) == 0
        tables.append(pyarrow.parquet.read_table(file, columns=["prompt", "completion", "correct"]).to_pylist())
    assert tables[0] == tables[1]
    assert 0 < sum(row["correct"] for row in tables[0]) < 32
