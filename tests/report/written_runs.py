"""Runs that are written with the writers of a trainer, and trained by nobody: large ones, and hostile ones."""

import random
from pathlib import Path
from typing import Any

from gruppo.run.directory import RunDirectory
from gruppo.types import Group, Prompt, Rollout, Trajectory

CONFIG = """model: {model}
data: problems.jsonl
loss: grpo
advantage: grpo
group_size: 8
rewards: [exact_match]
sampler: torch
seed: 0
steps: {steps}
"""


def run_directory(path: Path, steps: int, model: str = "builtin") -> RunDirectory:
    run = RunDirectory.create(str(path), CONFIG.format(steps=steps, model=model))
    run.log_event("start", step=0, loss="GRPOLoss: loss\n  weight      mean over all tokens of the step")
    return run


def rollout(prompt: Prompt, draw: random.Random, length: int, **facts: Any) -> Rollout:
    """A rollout of random tokens of the embedded model, whose policy moved a little."""
    tokens = tuple(draw.randrange(4, 14) for _ in range(length))
    old = [-draw.expovariate(2) for _ in tokens]
    facts = {"reward": float(draw.random() < 0.4), "advantage": draw.gauss(0, 1)} | facts
    text = facts.pop("text", " ".join(map(str, tokens)))
    columns: dict[str, Any] = {
        "old_logps": tuple(old),
        "policy_logps": tuple(x + draw.gauss(0, 0.01) for x in old),
        "ref_logps": tuple(x + draw.gauss(0, 0.1) for x in old),
        "entropies": tuple(draw.random() for _ in tokens),
        "clipped": (0,) * length,
    }
    trajectory = Trajectory(prompt=prompt, tokens=tokens, logps=tuple(old), text=text)
    return Rollout(
        trajectory=trajectory,
        correct=facts["reward"] == 1,
        rewards={"exact_match": facts["reward"]},
        **(columns | facts),
    )


def metrics_of(step: int, draw: random.Random) -> dict[str, float]:
    names = ("reward/mean", "reward/std", "group/dead_frac", "rollout/entropy", "live/approx_kl", "optim/grad_norm")
    further = {f"mine/number_{i}": draw.random() for i in range(30)}
    return {name: draw.random() + step / 1000 for name in names} | {"completion/len_mean": 80.0} | further


def write_large_run(path: Path, *, steps: int, groups: int, group_size: int, length: int) -> RunDirectory:
    """A finished run with the completions of every step. Eight steps are drawn; the others repeat their groups."""
    draw = random.Random(0)
    pool = []
    for _ in range(8):
        drawn = []
        for g in range(groups):
            prompt = Prompt(token_ids=(3, 4), text=f"What is {g} + {g}?", columns={"answer": str(2 * g)}, index=g)
            drawn.append(Group(prompt=prompt, rollouts=tuple(rollout(prompt, draw, length) for _ in range(group_size))))
        pool.append(drawn)
    with run_directory(path, steps) as run:
        for step in range(1, steps + 1):
            run.log_metrics(step, metrics_of(step, draw))
            run.log_timings(step, {"sample": 1.0, "reward": 0.1, "train": 2.0})
            run.write_completions(step, pool[step % len(pool)])
        run.set_status("done", steps)
    return run
