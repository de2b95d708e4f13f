"""Every estimator and every option that changes what is compared still learns, on the embedded task."""

from collections.abc import Callable
from typing import Any

import pytest

from gruppo.advantage import ADVANTAGES
from gruppo.trainer import GRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.long]
Make = Callable[..., GRPOTrainer]

ESTIMATORS: dict[str, dict[str, Any]] = {name: {"advantage": name} for name in ADVANTAGES}
ESTIMATORS["pass_at_k"]["advantage_options"] = {"k": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "dapo", "dynamic_sampling": 3},
    "retired prompts": {"retire_solved": 1},
    "kl in the reward": {"kl_in_reward": 0.01, "kl_target": 0.5},
    "moving reference": {"beta": 0.02, "ref_every": 5, "ref_mix": 0.5},
    "shapes": {"overlong_cache": 2, "truncated_factor": 0.5},
    "two rewards": {
        "advantage": "gdpo", "rewards": ("exact_match", "length_penalty"), "reward_weights": (1.0, 0.1),
        "correct_at": 0.9,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*ESTIMATORS, *OPTIONS])
def test_a_few_steps_lift_held_out_accuracy(name: str, demo_trainer: Make) -> None:
    # Measured on seeds 0 and 1 after 40 steps: 0.98 to 1.00, best_of_group 0.70 and 0.77. After 25 steps on seed 0:
    # 0.77 to 0.82, best_of_group 0.63. The standard error of 128 prompts is 0.04.
    steps, least = (40, 0.65) if name == "best_of_group" else (25, 0.7)
    trainer = demo_trainer(steps=steps, eval_prompts=128, **(ESTIMATORS | OPTIONS)[name])
    result = trainer.train()
    assert result.before is not None and result.after is not None
    assert result.before.accuracy == pytest.approx(0.555, abs=0.01)
    assert result.after.accuracy > least
    if name == "dapo":
        for metrics in result.metrics[1:]:
            assert metrics["dynamic/batches"] <= 3
            assert metrics["dynamic/groups_kept"] == 32.0
        assert all(len({r.reward for r in g.rollouts}) > 1 for g in trainer.kept)
    if name == "retired prompts":
        assert result.metrics[-1]["dynamic/prompts_retired"] > 100
