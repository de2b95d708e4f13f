"""The loop: prompts in, a better model out.

    config.py     TrainConfig: the groups of `gruppo.options` together, checked before anything heavy is loaded
    plan.py       what a run will do, in numbers, before it does it
    build.py      parts of a run, made from its config
    trainer.py    GRPOTrainer: the loop, one method per stage
    rollout.py    groups of a step, sampled and scored; dynamic sampling
    assign.py     advantages for the groups of a step, with log-probs for a KL penalty before and masks after
    advantages.py penalties come off the rewards, then the estimator compares
    learner.py    optimizer steps on the rollouts of a step
    state.py      solved prompts, adaptive coefficients, a reference that moves
    snapshot.py   what a checkpoint holds
    evaluate.py   held-out score, pass@k, confidence intervals

What a run records is in `gruppo.run`. Nothing imports the trainer but the command line.
"""

from typing import TYPE_CHECKING, Any

from gruppo.errors import require_train

require_train("gruppo.trainer", "pydantic")

from gruppo.trainer.config import TrainConfig  # noqa: E402

if TYPE_CHECKING:
    from gruppo.trainer.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":  # brings torch; a config can be read without it
        from gruppo.trainer.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
