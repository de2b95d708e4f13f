"""Every number that a run reports is documented, under one name, with what it averages over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gruppo.keys import KEYS, find
from gruppo.trainer import GRPOTrainer

Make = Callable[..., GRPOTrainer]

LIVE = {"rewards": ("step_rewards:by_place",), "correct_by": "by_place"}
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
    "ahead": {"max_staleness": 1},
    "streaming": {"max_staleness": 1, "streaming": True},
    "turns": {
        "model": "builtin-chat",
        "data": "builtin:calculator",
        "tools": ("gruppo.task.calculator:multiply",),
        "rewards": ("exact_match",),
        "max_new_tokens": 40,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_every_key_of_a_run_is_documented(name: str, make_trainer: Make) -> None:
    trainer = make_trainer(**RUNS[name], eval_prompts=8, eval_samples=2)
    keys = set(trainer.step()) | set(trainer.step()) | set(trainer.evaluate().metrics)
    assert sorted(key for key in keys if find(key) is None) == []


def test_nothing_is_documented_that_no_run_reports(make_trainer: Make, tmp_path: Path) -> None:
    seen: set[str] = set()
    for i, options in enumerate(RUNS.values()):
        trainer = make_trainer(**options, eval_prompts=8, eval_samples=2, output=str(tmp_path / str(i)))
        seen |= set(trainer.step()) | set(trainer.evaluate().metrics)
    elsewhere = ("sync/", "log/dropped", "live/top_k_kl")  # vLLM, a full disk, top_k_kl
    keys = [key for key in KEYS if not key.name.startswith(elsewhere)]
    assert [key.name for key in keys if not any(key.matches(known) for known in seen)] == []


def test_the_most_specific_key_describes_a_name() -> None:
    assert find("policy/entropy_coef") is not find("policy/entropy")
    assert [find(f"eval/pass@16{end}").name for end in ("", "_low")] == ["eval/pass@<k>", "eval/pass@<k>_low"]  # type: ignore[union-attr]
    assert find("reward/mine/mean").name == "reward/<name>/mean"  # type: ignore[union-attr]
    assert find("reward/mine/steps").name == "reward/<name>/<metric>"  # type: ignore[union-attr]
    assert find("rewards/mean") is None


def test_a_range_comes_with_a_remedy() -> None:
    with_range = [key for key in KEYS if key.alarm is not None]
    assert len(with_range) >= 4 and all(key.remedy for key in with_range)
    kl = find("live/approx_kl")
    assert kl is not None and kl.alarm == (0.0, 1.0)
