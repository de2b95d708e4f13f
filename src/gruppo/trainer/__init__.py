"""The loop: prompts in, a better model out.

    config.py    TrainConfig: every option, checked before anything heavy is loaded
    plan.py      what a run will do, in numbers, before it does it
    build.py     parts of a run, made from its config
    trainer.py   GRPOTrainer: the loop, one method per stage
    rollout.py   groups of a step, sampled and scored; dynamic sampling
    advantages.py  penalties come off the rewards, then the estimator compares
    state.py     solved prompts, adaptive coefficients, a reference that moves
    evaluate.py  held-out score, pass@k, confidence intervals
    advice.py    what the numbers of a run say about their cause
    run_dir.py   the run directory: config, metrics, completions, checkpoints, status
    checkpoints.py  which checkpoint to resume from, which to prune
    tracker.py   TensorBoard, W&B and trackio: views of the run directory that can never stop a run
    signals.py   Ctrl-C and SIGTERM save before they end a run
    console.py   what a person sees while it runs

Nothing imports the trainer but the command line.
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
