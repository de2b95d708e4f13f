"""`gruppo train` and `gruppo resume`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from gruppo.cli.options import parse, parse_run
from gruppo.trainer.config import TrainConfig

if TYPE_CHECKING:
    from gruppo.trainer.trainer import GRPOTrainer, TrainResult

Show = Callable[[Console, "GRPOTrainer", "TrainResult"], None]

STOPPED = 75
"""Exit code of a run that a signal stopped and that was saved: queue it again and resume."""

TRAIN_HELP = """Train a model with group-relative policy optimization.

Everything can stand in a file (gruppo train --config run.yaml); flags win over the file. --recipe NAME starts from
what a paper trained with (gruppo recipes lists them); file and flags win over it. A step is set by three numbers:
prompts_per_step, group_size, and tokens_per_microbatch, which affects memory only. The rest follows and is printed as a
plan.

  gruppo train --data problems.jsonl --rewards number_match --model Qwen/Qwen3-0.6B --lora --output runs/math
  gruppo train --config run.yaml --loss gspo --clip-range 3e-4 4e-4 --seed 1 --output runs/gspo-1

A data row is {"prompt": text or chat messages, "answer": ..., any further columns}; rewards get the columns by name.
"""


def train(arguments: Sequence[str]) -> int:
    return run(parse_run(arguments, verb="train", description=TRAIN_HELP, preset={}))


@dataclass
class ResumeArguments:
    """Go on with a run from its newest whole checkpoint. On the same machine with the same threads and versions the
    result is that of a run that was never stopped, bit for bit."""

    directory: tyro.conf.Positional[Path]
    """The run directory."""
    steps: Annotated[int | None, tyro.conf.arg(help="Go on to this step instead of the run's own last one.")] = None


def resume(arguments: Sequence[str]) -> int:
    given = parse(ResumeArguments, arguments, "resume")
    own = {} if given.steps is None else {"steps": given.steps}
    return run(TrainConfig.of_run(given.directory, own), resume=True)


def show_accuracy(console: Console, trainer: "GRPOTrainer", result: "TrainResult") -> None:
    """The held-out accuracy, and where the model is."""
    if result.after is not None:
        before = "" if result.before is None else f"{result.before.accuracy:.3f} -> "
        console.print(f"held-out accuracy {before}{result.after.accuracy:.3f}")
    console.print(f"done: {trainer.run.model} holds the model, {trainer.run.path} the run")


def run(config: TrainConfig, *, resume: bool = False, opening: str = "", show: Show = show_accuracy) -> int:
    """Train: print `opening` and the plan before, and after a run that was not stopped what `show` prints."""
    from gruppo.trainer import GRPOTrainer

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)  # paths, printed as they are
    if opening:
        console.print(opening)
    trainer = GRPOTrainer(config, resume=resume)
    for line in trainer.plan().lines(config):
        console.print(line)
    if resume:
        console.print(f"resuming after step {trainer.step_number}")
    result = trainer.train()
    if result.status == "stopped":
        console.print(f"stopped after step {result.step} and saved; go on with: gruppo resume {config.output}")
        return STOPPED
    show(console, trainer, result)
    return 0
