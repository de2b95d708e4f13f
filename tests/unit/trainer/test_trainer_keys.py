"""Every number that a run reports is documented, under one name, with what it averages over."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gruppo.trainer import GRPOTrainer

Make = Callable[..., GRPOTrainer]
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

LIVE = {"rewards": ("step_rewards:by_place",)}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1, "entropy_coef": 0.01, "epochs_per_batch": 2, **LIVE},
    "shaped": {"overlong_cache": 4, "truncated_factor": 0.5, "kl_in_reward": 0.1, "kl_target": 1.0},
    "dynamic": {"dynamic_sampling": 3, "retire_solved": 1},
    "entropy target": {"entropy_coef": 0.01, "entropy_target": 0.5},
    "two rewards": {"rewards": ("exact_match", "length_penalty", "step_rewards:logs_a_metric")},
    "pull": {"loss": "prime", **LIVE},
    "nll": {"loss": "vapo", **LIVE},
    "rejecting": {"loss": "m2po", **LIVE},
    "gspo": {"loss": "gspo", "minibatches": 2, **LIVE},
    "corrected": {"correction": "mask", **LIVE},
}


def documented() -> list[str]:
    """Keys of the first column of the page's tables; <name> stands for any."""
    cells = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(encoding="utf-8"), re.M)
    return [key for cell in cells for key in re.findall(r"`([a-z]+/[^`]+)`", cell)]


def pattern(key: str) -> str:
    parts = re.split(r"(<\w+>)", key)
    return "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in parts)


def is_documented(key: str, keys: list[str]) -> bool:
    key = key.replace("live/", "train/") if f"train/{key.removeprefix('live/')}" in keys else key
    return any(re.fullmatch(pattern(known), key) for known in keys)


@pytest.mark.parametrize("name", RUNS)
def test_every_key_of_a_run_is_documented(name: str, make_trainer: Make) -> None:
    trainer = make_trainer(**RUNS[name], eval_prompts=8, eval_samples=2)
    keys = set(trainer.step()) | set(trainer.step()) | set(trainer.evaluate().metrics)
    assert sorted(key for key in keys if not is_documented(key, documented())) == []


def test_the_page_documents_nothing_that_no_run_reports(make_trainer: Make, tmp_path: Path) -> None:
    seen: set[str] = set()
    for i, options in enumerate(RUNS.values()):
        trainer = make_trainer(**options, eval_prompts=8, eval_samples=2, output=str(tmp_path / str(i)))
        seen |= set(trainer.step()) | set(trainer.evaluate().metrics)
    elsewhere = ("sync/", "log/dropped", "train/top_k_kl", "live/policy_confidence")  # vLLM, a full disk, top_k_kl
    keys = [key for key in documented() if not key.startswith(elsewhere) and "…" not in key]
    seen |= {key.replace("live/", "train/") for key in seen}
    assert [key for key in keys if not any(re.fullmatch(pattern(key), known) for known in seen)] == []
