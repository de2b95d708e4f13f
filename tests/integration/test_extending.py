"""docs/extending.md, followed literally: its five files are saved, its commands run, and the numbers are right."""

import json
import math
import re
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet
import pytest

from gruppo.cli.main import run
from gruppo.errors import InputError

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8").split("## Parts of a loss")[0]
SECTIONS = {
    name: (code, commands.splitlines())
    for name, code, commands in re.findall(r"```python\n# (\w+)\.py\n(.*?)```\n\n```sh\n(.*?)```", PAGE, re.S)
}

pytestmark = pytest.mark.slow


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Metrics, completions and output of a section's commands, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")

    def follow(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        code, commands = SECTIONS[name]
        Path(f"{name}.py").write_text(code, encoding="utf-8")
        for command in commands:
            words = shlex.split(command)
            assert words[0] == "gruppo"
            assert run(words[1:]) == 0
        (folder,) = Path("runs").iterdir()
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        files = sorted((folder / "completions").glob("*.parquet"))
        rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
        return metrics, rows, capfd.readouterr().out

    yield follow
    for name in SECTIONS:
        sys.modules.pop(name, None)  # another test may have a module of that name


def of_step(rows: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] == step]


def test_every_file_is_short() -> None:
    assert sorted(SECTIONS) == ["my_advantage", "my_loss", "my_metric", "my_reward", "my_sampler"]
    assert all(code.count("\n") + 1 < 40 for code, _ in SECTIONS.values())


def test_the_reward_of_the_page_scores_the_tens(follow: Any) -> None:
    metrics, rows, _ = follow("my_reward")
    for line in metrics[1:]:  # the first is the evaluation before the first step
        texts = [(row["completion"], row["prompt"]) for row in of_step(rows, line["step"])]
        right = [sum(map(int, prompt.strip("=").split("+"))) // 10 % 10 == int(text[1]) for text, prompt in texts]
        assert 0 < sum(right) < len(right)
        assert line["reward/tens/mean"] == pytest.approx(fmean(right))


def test_the_advantage_of_the_page_is_the_gap_to_the_best(follow: Any) -> None:
    _, rows, _ = follow("my_advantage")
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


def test_the_loss_of_the_page_trains(follow: Any) -> None:
    metrics, rows, printed = follow("my_loss")
    assert "-2*tanh(r/2)*A" in printed and "SoftCapLoss" in printed
    for line in metrics[1:]:  # the first is the evaluation before the first step
        # ratio 1, one update: the mean over tokens of -2*tanh(1/2)*A
        tokens = [row["advantage"] for row in of_step(rows, line["step"]) for _ in row["tokens"]]
        assert line["policy/policy"] == pytest.approx(-2 * math.tanh(0.5) * fmean(tokens), abs=1e-5)


def test_the_metric_of_the_page_counts_unlikely_tokens(follow: Any) -> None:
    metrics, rows, _ = follow("my_metric")
    seen = []
    for line in metrics[1:]:  # the first is the evaluation before the first step
        live = [row for row in of_step(rows, line["step"]) if row["advantage"]]
        logps = [x for row in live for x in row["logps"]]
        assert line["live/unlikely_frac"] == pytest.approx(fmean(x < math.log(0.5) for x in logps), abs=1e-9)
        seen.append(line["live/unlikely_frac"])
    assert max(seen) > 0


def test_the_sampler_of_the_page_draws_with_the_log_probs_of_the_trainer(follow: Any) -> None:
    metrics, rows, _ = follow("my_sampler")
    for line in metrics[1:]:  # the first is the evaluation before the first step
        drawn = of_step(rows, line["step"])
        assert len(drawn) == 4 * 8
        assert 0 < line["sampler/logp_gap_max"] < 1e-4
    completions = {(row["prompt_index"], tuple(row["tokens"])) for row in rows}
    assert len(completions) > len({row["prompt_index"] for row in rows})  # groups differ: it draws
    assert run(["sample", "1+1=", "--sampler", "my_sampler:Generate", "--max-new-tokens", "4"]) == 0
    with pytest.raises(InputError, match="sampler='math:sqrt' is no class of samplers"):
        run(["train", "--sampler", "math:sqrt", "--output", "runs/none"])
