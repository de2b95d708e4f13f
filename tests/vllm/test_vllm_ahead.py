"""Rollouts ahead with a real vLLM server: each step is sampled from the weights of the schedule."""

import copy
import signal
from pathlib import Path
from typing import Any

from small_runs import logps_by_transformers, options

from gruppo.trainer import GRPOTrainer, TrainConfig


def test_a_server_samples_ahead_from_the_weights_of_the_schedule(tmp_path: Path) -> None:
    small = options(tmp_path / "run", sampler="vllm:start", max_staleness=1, eval_prompts=4, eval_every=3)
    models: dict[int, Any] = {}
    sampled: dict[int, list[Any]] = {}

    def keep(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        models[step] = copy.deepcopy(trainer.model.model)
        sampled[step] = [r.trajectory for g in trainer.groups[:3] for r in g.rollouts]

    trainer = GRPOTrainer(TrainConfig(**small), callbacks=[keep], quiet=True)
    trainer.train()
    rows = [row for row in trainer.run.metrics() if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    for step in (3, 4, 6):  # the evaluation after step 3 loads other weights in between
        expected, other = (logps_by_transformers(models[step - n], sampled[step], 0.7) for n in (2, 1))
        gaps = [
            max(abs(a - b) for t, row in zip(sampled[step], of, strict=True) for a, b in zip(t.logps, row, strict=True))
            for of in (expected, other)
        ]
        assert gaps[0] < 1e-4 < gaps[1], (step, gaps)


def test_a_run_that_is_stopped_while_the_server_samples_is_the_run_that_was_not(tmp_path: Path) -> None:
    small = options(tmp_path / "whole", sampler="vllm:start", max_staleness=1, group_size=16, max_new_tokens=32)
    whole = GRPOTrainer(TrainConfig(**small), quiet=True).train()

    def stop(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        if step == 3:
            while trainer.schedule.is_idle:
                pass
            trainer.stop.signal = signal.SIGTERM

    small["output"] = str(tmp_path / "run")
    assert GRPOTrainer(TrainConfig(**small), callbacks=[stop], quiet=True).train().status == "stopped"
    again = GRPOTrainer(TrainConfig(**small), resume=True, quiet=True).train()
    named = [[row["rollout/staleness"], row["reward/mean"]] for row in whole.metrics]
    assert [[row["rollout/staleness"], row["reward/mean"]] for row in again.metrics] == named
