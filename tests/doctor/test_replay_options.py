"""Replay gives the recorded gradient whatever options the run had that change what was trained."""

from pathlib import Path
from typing import Any

import pytest
from real_runs import has_carry, trained

from gruppo.replay import replay
from gruppo.task.carries import carries_rows

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "steps": 3,
    "save_every": 1,
    "keep_checkpoints": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "temperature": 1.5,
    "lr": 1e-3,
}

OPTIONS = {
    "a reference that moves": {"beta": 0.04, "ref_every": 1, "ref_mix": 0.5},
    "KL in the reward, entropy target": {
        "kl_in_reward": 0.05,
        "entropy_target": 0.3,
        "entropy_coef": 0.01,
        "loss": "dapo",
    },
    "dynamic sampling, micro-batches": {"dynamic_sampling": 2, "tokens_per_microbatch": 30, "loss": "gspo"},
    "sampled ahead, with a correction": {"max_staleness": 1, "correction": "mask", "loss": "cispo"},
    "truncated ones masked, shared prompts": {"temperature": 2.5, "mask_truncated": True, "layout": "shared"},
    "a loss that surveys the step": {"loss": "top_entropy", "minibatches": 2},
    "a loss that draws tokens, bfloat16": {"loss": "clip_cov", "epochs_per_batch": 2, "dtype": "bfloat16"},
    "penalties, another advantage": {"overlong_cache": 2, "advantage": "rloo", "loss": "drgrpo"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_runs_own_loss_gives_the_recorded_gradient(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = [row for row in carries_rows("train")[::37] if has_carry(row["prompt"])]
    run = trained(tmp_path / "run", {"data": rows}, **SMALL | options)
    norms = {line["step"]: line.get("optim/grad_norm") for line in run.metrics()}
    compared = [step for step in (1, 3) if norms[step]]
    for step in compared:
        found = replay(run, step)
        assert found.weights is not None and found.replayed_norm == pytest.approx(norms[step], rel=1e-6)
    assert compared
