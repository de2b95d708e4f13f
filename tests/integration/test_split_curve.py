"""However a step is cut into micro-batches, the run is the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gruppo.task.carries import carries_rows
from gruppo.trainer import GRPOTrainer

pytestmark = pytest.mark.slow
SMALL = {
    "prompts_per_step": 4,
    "group_size": 4,
    "eval_prompts": 0,
    "steps": 5,
    "warmup_steps": 0,
    "epochs_per_batch": 2,
}


def curve(trainer: GRPOTrainer) -> list[tuple[float, float, float, float]]:
    keys = ("policy/loss", "reward/mean", "optim/grad_norm", "train/entropy")
    return [tuple(metrics.get(k, 0.0) for k in keys) for metrics in (trainer.step() for _ in range(5))]


# Every sequence alone, a few at a time, everything at once. From top_entropy on, losses that look at the whole step.
@pytest.mark.parametrize(
    ("loss", "budgets"),
    [
        ("grpo", (1, 40, 10_000)),
        ("gspo", (1,)),
        ("bnpo", (1,)),
        ("prime", (40,)),
        ("top_entropy", (1, 40)),
        ("clip_cov", (40,)),
        ("m2po", (40,)),
        ("vapo", (40,)),
    ],
)
def test_any_split_gives_the_same_curve_to_1e_5(
    loss: str, budgets: tuple[int, ...], demo_trainer: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in carries_rows("train")[::80]))
    options = {**SMALL, "loss": loss, "temperature": 1.2, "max_new_tokens": 6, "data": str(data)}
    whole = curve(demo_trainer(**options))
    for budget in budgets:
        split = curve(demo_trainer(**options, tokens_per_microbatch=budget))
        for ours, theirs in zip(split, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
