"""The loop: prompts in, a better model out.

    config.py    TrainConfig: every option, checked before anything heavy is loaded
    plan.py      what a run will do, in numbers, before it does it
    build.py     from a config to a model, prompts, rewards and loss
    build_credit.py  from a config to the estimator, reward shapes and memory
    trainer.py   GRPOTrainer: `step()` reads like the algorithm
    rounds.py    prompts of a step, sampled and scored; dynamic sampling
    credit.py    from rewards to advantages: shapes, KL in the reward, the estimator
    collect.py   the steps of that, as functions
    entropy_bonus.py  the entropy bonus, and the target that moves it
    reward_kl.py KL to the reference in the reward, and its controller
    solved.py    prompts that are solved and drawn no more
    memory.py    what a run remembers besides weights and optimizer
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

from gruppo.trainer.config import TrainConfig

if TYPE_CHECKING:
    from gruppo.trainer.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":  # brings torch; a config can be read without it
        from gruppo.trainer.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
