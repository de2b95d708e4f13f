"""`gruppo train` and `gruppo resume`: from flags to a GRPOTrainer, in one process or on several ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from rich.console import Console

from gruppo.cli.arguments import HomePath, RunArguments, Word, parse, parse_options, run_config
from gruppo.cli.ray import RayOptions, launch
from gruppo.errors import RankError, Terminated
from gruppo.keys import held_out_name
from gruppo.process.streams import safe_streams, shell_word
from gruppo.run.reader import RunReader
from gruppo.run.signals import STOPPED, StopFlag, handling, stop_signals
from gruppo.trainer.config import TrainConfig

if TYPE_CHECKING:
    from gruppo.parallel.ranks import Ranks
    from gruppo.trainer.trainer import GRPOTrainer, TrainResult

Show = Callable[[Console, "GRPOTrainer", "TrainResult"], None]


class TrainArguments(RayOptions, RunArguments):
    """Train a model with group-relative policy optimization.

    Every option can be in a file (gruppo train --config run.yaml); flags win over the file. --recipe NAME starts from
    the options of a paper (gruppo recipes lists them); file and flags win over it. A step is set by three numbers:
    prompts_per_step, group_size, and tokens_per_microbatch, which affects memory only. The rest follows and is printed
    as a plan.

    gruppo train --data problems.jsonl --rewards number_match --model Qwen/Qwen3-0.6B --lora --output runs/math
    gruppo train --config run.yaml --loss gspo --clip-range 3e-4 4e-4 --seed 1 --output runs/gspo-1

    A data row is {"prompt": text or chat messages, "answer": ..., any further columns}; rewards get the columns by
    name.
    """


def train(arguments: Sequence[str]) -> int:
    given, flags = parse_options(TrainArguments, arguments, "train")
    config = run_config(given, flags, "train")
    if given.ray is not None:
        return launch(given, config, partial(run, config, overwrite=given.overwrite, view=given.view))
    return run(config, overwrite=given.overwrite, view=given.view)


class ResumeArguments(RayOptions):
    """Continue a run from its newest whole checkpoint. On the same machine with the same threads and versions the
    result is that of a run that was never stopped, bit for bit. This runs the code that the run's config names: its
    rewards, loss and metrics."""

    refusal: ClassVar[str] = (
        "the options of a run are those of its config.yaml, and only --steps changes. To go on with others, edit "
        "config.yaml in the run directory and give --accept-changes; for another run, gruppo train --config"
    )

    directory: Annotated[HomePath, Word("RUN", is_positional=True)]
    """The run directory."""
    steps: int | None = None
    """Continue to this step instead of the run's own last one."""
    accept_changes: bool = False
    """Continue although options in config.yaml, the prompts or the base weights differ from those at the start of the
    run."""
    trust: bool = False
    """Run what the config names although another user owns the directory or can write it."""


def resume(arguments: Sequence[str]) -> int:
    given = parse(ResumeArguments, arguments, "resume")
    own = {} if given.steps is None else {"steps": given.steps}
    RunReader(given.directory).check_owner(given.trust)
    config = TrainConfig.of_run(given.directory, own)
    if given.ray is not None:
        return launch(given, config, partial(run, config, resume=True, accept_changes=given.accept_changes))
    return run(config, resume=True, accept_changes=given.accept_changes)


def _leaving_tidily() -> AbstractContextManager[None]:
    """Turn signals into exceptions, so that a run stopped before training cleans up. Training handles signals
    itself."""

    def leave(number: int, frame: object) -> None:
        raise Terminated(number)

    return handling(leave, *stop_signals())


@contextmanager
def _viewed(path: Path, console: Console) -> Iterator[None]:
    """Serve the run's page while it trains, from a separate process, so that it takes no time from the run."""
    command = [sys.executable, "-m", "gruppo", "view", str(path), "--until-closed"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # A session of its own: Ctrl-C is for the run, which goes on to save.
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        console.print(process.stdout.readline().strip())
        try:
            yield
        finally:
            process.stdin.close()  # it ends with this, also where the run is killed


def show_score(console: Console, trainer: "GRPOTrainer", result: "TrainResult") -> None:
    """The held-out score, and where the model is."""
    if result.after is not None and result.after.score is not None:
        before = "" if result.before is None or result.before.score is None else f"{result.before.score:.3f} -> "
        console.print(f"{result.after.name} {before}{result.after.score:.3f}")
    run = trainer.run.path
    console.print(f"done: {trainer.run.model} holds the model, {run} the run")
    console.print(f"report: gruppo report {shell_word(run)} (writes {run / 'report.html'})")


def run(
    config: TrainConfig,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    view: bool = False,
    opening: str = "",
    show: Show = show_score,
    heed: Callable[[StopFlag], None] = lambda stop: None,
) -> int:
    """Train: print `opening` first, and call `show` after a run that was not stopped. Of the ranks that a launcher
    started, the first trains and the others follow it. `view` serves the run's page meanwhile. `heed` gets the flag
    with which a launcher stops a run that no signal reaches."""
    from gruppo.parallel.ranks import is_of_ranks, join, leave, world_of_launcher

    if _began_before(config.output):
        resume, overwrite = True, False
    options: dict[str, Any] = {"resume": resume, "accept_changes": accept_changes, "overwrite": overwrite}
    train_alone = partial(_run, config, **options, view=view, opening=opening, show=show, heed=heed)
    if world_of_launcher() == 1:
        return train_alone()
    ranks = join(config.advanced.rank_deadline)
    code = 1
    try:
        if ranks.rank:
            from gruppo.trainer.rank_worker import follow

            code = follow(ranks)
        else:
            code = train_alone(ranks=ranks)
    except BaseException as failure:
        error = failure
        if is_of_ranks(error) and not isinstance(error, RankError):
            error = ranks.lost("the start", failure, "Start them again")
        code = getattr(error, "exit_code", 1)
        ranks.note_error(code, f"{type(error).__name__}: {error}")
        if error is not failure:
            raise error from failure
        raise
    finally:
        leave(ranks, code, is_lost=isinstance(sys.exception(), RankError))
    return code


def _launch() -> str | None:
    """Name of this launch, unchanged when the launcher restarts the process; None without a launcher."""
    name = os.environ.get("GRUPPO_LAUNCH") or os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":  # what torchrun has without --rdzv-id or --standalone
        return name
    try:
        facts = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{os.getppid()}-{facts[19]}"  # with the tick at which it began: ids are used again


def _began_before(output: str) -> bool:
    """True if a launcher restarts ranks that had begun this run, rather than found an older one."""
    if "GRUPPO_LAUNCH" not in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    launches = [event.get("name") for event in RunReader(output).events() if event.get("event") == "launch"]
    return launches[-1:] == [_launch()]


def _run(
    config: TrainConfig,
    *,
    resume: bool,
    accept_changes: bool,
    overwrite: bool,
    view: bool,
    opening: str,
    show: Show,
    heed: Callable[[StopFlag], None],
    ranks: "Ranks | None" = None,
) -> int:
    # Before the imports: what they bring keeps the streams that it finds.
    with safe_streams(), _leaving_tidily():
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)  # paths, printed as they are
        if opening:
            console.print(opening, soft_wrap=False)
        try:
            from gruppo.trainer import GRPOTrainer

            trainer = GRPOTrainer(
                config, resume=resume, accept_changes=accept_changes, overwrite=overwrite, ranks=ranks
            )
        except (KeyboardInterrupt, Terminated):
            saved = f"went on; {RunReader(config.output).saved()}" if resume else "began; nothing was saved"
            print(f"left before training {saved}", file=sys.stderr)
            raise
        heed(trainer.stop)
        if (name := _launch()) is not None:
            trainer.run.log_event("launch", step=trainer.step_number, name=name)
        if not view and trainer.has_steps:
            console.print(f"watch: gruppo view {shell_word(trainer.run.path)}")
        with _viewed(trainer.run.path, console) if view else nullcontext():
            result = trainer.train()
        if result.status == "stopped":
            console.print(
                f"stopped after step {result.step} and saved; go on with: gruppo resume {shell_word(config.output)}"
            )
            return STOPPED
        show(console, trainer, result)
        if config.keep_best:
            best = [event for event in trainer.run.events() if event["event"] == "best"][-1:]
            found = [
                f"best: step {b['step']}, {held_out_name(b['key'])} {b['score']:.3f}, in {trainer.run.best}"
                for b in best
            ]
            console.print(*found or ["best: no evaluation was better than the first"])
        return 0
