"""docs/extending.md, followed literally: its four files are saved, its commands run, and the numbers are right."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8").split("## Parts of a loss")[0]
SECTIONS = {
    name: (code, commands.splitlines())
    for name, code, commands in re.findall(r"```python\n# (\w+)\.py\n(.*?)```\n\n```sh\n(.*?)```", PAGE, re.S)
}

pytestmark = pytest.mark.slow


def follow(name: str, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Metrics, completions and output of a section's commands."""
    code, commands = SECTIONS[name]
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    printed = ""
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "gruppo"
        done = subprocess.run(
            [sys.executable, "-m", "gruppo", *words[1:]],
            cwd=folder,
            env=os.environ | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    (run,) = (folder / "runs").iterdir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run / "completions").glob("*.parquet"))
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    return metrics, rows, printed


def of_step(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] == step]


def test_every_file_is_short() -> None:
    assert sorted(SECTIONS) == ["my_advantage", "my_loss", "my_metric", "my_reward"]
    assert all(code.count("\n") + 1 < 30 for code, _ in SECTIONS.values())


def test_the_reward_of_the_page_scores_the_tens(tmp_path: Path) -> None:
    metrics, rows, _ = follow("my_reward", tmp_path)
    for line in metrics[1:]:  # the first is the evaluation before the first step
        texts = [(row["completion"], row["prompt"]) for row in of_step(rows, line["step"])]
        right = [sum(map(int, prompt.strip("=").split("+"))) // 10 % 10 == int(text[1]) for text, prompt in texts]
        assert 0 < sum(right) < len(right)
        assert line["reward/tens/mean"] == pytest.approx(fmean(right))


def test_the_advantage_of_the_page_is_the_gap_to_the_best(tmp_path: Path) -> None:
    _, rows, _ = follow("my_advantage", tmp_path)
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["step"], row["prompt_index"]].append(row)
    mixed = 0
    for group in groups.values():
        rewards = [row["reward"] for row in group]
        gaps = [reward - max(rewards) for reward in rewards]
        expected = [gap - fmean(gaps) for gap in gaps]
        assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-6)
        mixed += max(rewards) > min(rewards)
    assert mixed > 5


def test_the_loss_of_the_page_trains(tmp_path: Path) -> None:
    metrics, rows, printed = follow("my_loss", tmp_path)
    assert "-2*tanh(r/2)*A" in printed and "SoftCapLoss" in printed
    for line in metrics[1:]:  # the first is the evaluation before the first step
        # ratio 1, one update: the mean over tokens of -2*tanh(1/2)*A
        tokens = [row["advantage"] for row in of_step(rows, line["step"]) for _ in row["tokens"]]
        assert line["policy/policy"] == pytest.approx(-2 * math.tanh(0.5) * fmean(tokens), abs=1e-5)


def test_the_metric_of_the_page_counts_unlikely_tokens(tmp_path: Path) -> None:
    metrics, rows, _ = follow("my_metric", tmp_path)
    seen = []
    for line in metrics[1:]:  # the first is the evaluation before the first step
        live = [row for row in of_step(rows, line["step"]) if row["advantage"]]
        logps = [x for row in live for x in row["logps"]]
        assert line["live/unlikely_frac"] == pytest.approx(fmean(x < math.log(0.5) for x in logps), abs=1e-9)
        seen.append(line["live/unlikely_frac"])
    assert max(seen) > 0
