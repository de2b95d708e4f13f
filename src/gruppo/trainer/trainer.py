"""GRPOTrainer: the algorithm, one method per stage."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from gruppo import doctor, faults
from gruppo.errors import CheckpointError, InputError, NumericError, RankError, RewardError
from gruppo.keys import held_out_key
from gruppo.parallel.ranks import Ranks
from gruppo.peer_names import METHODS
from gruppo.process.streams import printable, safe_streams, shell_word
from gruppo.reward import Reward
from gruppo.rollout.driver import Stopwatch
from gruppo.rollout.evaluate import Evaluation, evaluate
from gruppo.rollout.source import RolloutSource, dead_frac
from gruppo.run.reader import at_home
from gruppo.run.signals import Interrupted, StopFlag
from gruppo.trainer.advantages import shaped_mean, with_kl
from gruppo.trainer.callbacks import Callback, StepCallback, read_callbacks, tell
from gruppo.trainer.config import TrainConfig, refuse_arguments
from gruppo.trainer.estimate import RunEstimate, estimate_run
from gruppo.trainer.inputs import resolve_inputs
from gruppo.trainer.learner import MAX_SKIPPED, TokenRecord
from gruppo.trainer.parts import assemble
from gruppo.trainer.state import Ending
from gruppo.types import Group
from gruppo.weights.files import is_free, replacing
from gruppo.weights.source import check_repository, upload

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from gruppo.sampler import Sampler

logger = logging.getLogger(__name__)

MAX_UNREWARDED = 10
"""Steps in a row without any reward before the run stops. More than `MAX_SKIPPED`, because with one or two prompts per
step a step without any reward is normal."""


@dataclass(slots=True, repr=False)
class TrainResult:
    """Outcome of a run.

    >>> TrainResult(step=50, status="done")
    TrainResult(done after step 50)
    >>> TrainResult(step=20, status="done", ended=Ending("patience", steps=50))
    TrainResult(done after step 20 of 50, ended by patience)
    """

    step: int
    before: Evaluation | None = None
    after: Evaluation | None = None
    status: str = "running"
    ended: Ending | None = None
    """Why the run ended before its last step, if it did."""
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        found = [each for each in (self.before, self.after) if each is not None and each.score is not None]
        scores = " -> ".join(f"{each.score:.3f}" for each in found)
        held_out = f", {found[-1].name} {scores}" if found else ""
        early = f" of {self.ended.steps}, ended {self.ended.text}" if self.ended else ""
        return f"TrainResult({self.status} after step {self.step}{early}{held_out})"


class GRPOTrainer:
    """Trains a model with group-relative policy optimization.

        result = GRPOTrainer(TrainConfig(model="builtin", steps=50, output="runs/first")).train()

    The constructor checks everything and loads the model; `train` runs to the end, `step` takes one step.

    Args:
        config: the options; what follows stands for what they name.
        model: a transformers or PEFT model with its `tokenizer`, or a name.
        rewards: functions, `Reward`s and names. A function that a worker process cannot import runs in this one, and a
            call of it is given up at `reward_deadline`.
        data: a list of rows, a `datasets.Dataset`, a stream of rows, or a name; `eval_data` likewise.
        peft_config: a `LoraConfig` of PEFT.
        loss: a loss, its class, or a name; `advantage` an estimator likewise, `metrics` a list of metrics.
        tools: functions that the model may call, with type hints and a docstring, or their names.
        environment: what answers the model's turns: a class, a function that makes one, a mapping of these that the
            column `environment` chooses among, or a name. `environment_factory` is TRL's word for it.
        callbacks: `Callback`s, `transformers.TrainerCallback`s, and functions that are called after each step with
            (trainer, step, metrics); one that returns True ends the run.
        resume: go on with the run in `config.output`; one without a checkpoint starts over.
        accept_changes: with resume, also where options, prompts or base weights are not those that the run began with.
        overwrite: start over in the place of a run that `config.output` holds.
        quiet: print nothing.
        ranks: the processes that share the model; this one is the first, the others `follow`.
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        model: "PreTrainedModel | str | None" = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        rewards: Sequence[str | Reward | Callable[..., Any]] | None = None,
        data: Any = None,
        eval_data: Any = None,
        peft_config: Any = None,
        loss: Any = None,
        advantage: Any = None,
        metrics: Sequence[Any] | None = None,
        tools: Sequence[str | Callable[..., Any]] | None = None,
        environment: Any = None,
        environment_factory: Any = None,
        callbacks: Sequence[Callback | StepCallback | Any] = (),
        resume: bool = False,
        accept_changes: bool = False,
        overwrite: bool = False,
        quiet: bool = False,
        ranks: Ranks | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_arguments(unknown)
        self.callbacks = read_callbacks(callbacks)
        config, inputs = resolve_inputs(
            config or TrainConfig(),
            model=model,
            tokenizer=tokenizer,
            rewards=rewards,
            data=data,
            eval_data=eval_data,
            peft_config=peft_config,
            loss=loss,
            advantage=advantage,
            metrics=metrics,
            tools=tools,
            environment=environment,
            environment_factory=environment_factory,
        )
        self.stop = StopFlag()
        self.step_number = 0
        self.watch = Stopwatch(lambda: self.step_number)
        parts = assemble(
            config,
            inputs,
            stop=self.stop,
            watch=self.watch,
            resumes=resume,
            accept_changes=accept_changes,
            overwrite=overwrite,
            quiet=quiet,
            ranks=ranks,
        )
        self.config, self.prompts, self.run, self.recorder = parts.config, parts.prompts, parts.run, parts.recorder
        self.model, self.weights, self.schedule, self.scorer = parts.model, parts.weights, parts.schedule, parts.scorer
        self.advantages, self.learner, self.state = parts.advantages, parts.learner, parts.state
        self.snapshots, self._opened = parts.snapshots, parts.opened
        self.groups: list[Group] = []
        """The groups of the last step."""
        self._tokens: TokenRecord | None = None
        """Record of what the updates of the last step saw of each token."""
        self.step_number = parts.place.step
        self.unfinished = parts.place.unfinished
        """Metrics of a step that was taken and not yet recorded: its evaluation is still to be made."""
        self.ended = parts.place.ended
        """Why the run ended before its last step, if it did."""
        self._finished_version = self.model.version
        """Version of the weights after the last whole step."""
        self._saved = self.model.version if parts.place.is_done else None
        """Version of the weights in `model/`, if known."""
        self._unrewarded = 0
        """Steps in a row without any reward."""

    @property
    def sampler(self) -> "Sampler":
        """The sampler of the run."""
        return self.weights.sampler

    @property
    def source(self) -> RolloutSource:
        """Source of the rollouts of a step."""
        return self.schedule.source

    # --- one step: the algorithm ----------------------------------------------------------------------------------

    def step(self, *, record: bool = False) -> dict[str, float]:
        """Prompts -> rollouts -> rewards -> advantages -> update; returns the metrics of the step.

        Args:
            record: keep what the last update saw of each token, for `recorded`.
        """
        config, state, number = self.config, self.state, self.step_number + 1
        groups, metrics = self._rollouts(number)
        self._unrewarded = 0 if "reward/mean" in metrics else self._unrewarded + 1
        if self._unrewarded:
            text = "every reward function abstained (None) on every completion: the step teaches nothing. Check the "
            text += "columns that they read with `gruppo reward check`"
            if self._unrewarded == MAX_UNREWARDED:
                raise RewardError(f"{MAX_UNREWARDED} steps in a row have no reward, the last is step {number}: {text}")
            self.recorder.warned(number, "no_reward", text)
        kept = [group for group in groups if group.status == "kept"]
        if not kept:
            text = f"dynamic sampling found no group that teaches something among {len(groups)}: the step changes "
            text += "nothing. Raise group_size, temperature or dynamic_sampling, or take easier or harder prompts"
            self.recorder.warned(number, "no_signal", text)
        with self.watch("reward"):
            if config.kl_in_reward:
                kept, measured = with_kl(kept, self.model)
                metrics |= measured | {"reward/kl_coef": state.kl.coefficient}
            kept = self.advantages.assign(kept, state.kl.coefficient)
            if config.kl_in_reward or not self.advantages.shape.does_nothing:
                metrics |= shaped_mean(kept)
        if config.advanced.entropy_target is not None:
            bonus = state.entropy.at(metrics.get("rollout/entropy"))
            self.model.set_loss(self.model.loss.replace(entropy_coef=bonus))
        self._tokens = TokenRecord() if record else None
        with self.watch("train"):
            kept, learned = self.learner.update(kept, self._tokens)
        trained = iter(kept)
        self.groups = [next(trained) if group.status == "kept" else group for group in groups]
        metrics |= learned | {"group/dead_frac": dead_frac(self.groups)}
        if "sampler/logp_gap_mean" in metrics and (text := doctor.sampler_gap(metrics)):
            self.recorder.warned(number, "sampler_gap", text)
        self.step_number, self._finished_version = number, self.model.version
        return metrics | self._observe(metrics)

    @property
    def kept(self) -> list[Group]:
        """The groups of the last step that were trained on."""
        return [group for group in self.groups if group.status == "kept"]

    @property
    def recorded(self) -> list[Group]:
        """The groups of the last step with what its update saw of each token: `step(record=True)` keeps it."""
        return self.groups if self._tokens is None else self._tokens.given_to(self.groups)()

    def evaluate(self) -> Evaluation | None:
        """The held-out score of the weights as they are; None without held-out prompts."""
        prompts, num_samples = self.prompts.held_out.prompts, self.config.eval_samples
        if not prompts:
            return None
        self.schedule.drain()  # the sampler has one set of weights
        self.weights.bring(self.watch)
        with self.watch("eval"):
            driver = replace(self.source.driver, watch=Stopwatch())
            return evaluate(prompts, driver, self.source.params, num_samples=num_samples)

    # --- the whole run --------------------------------------------------------------------------------------------

    def train(self, **unknown: Never) -> TrainResult:
        """Run to the last step (or a stop), save the model, return how it went."""
        if unknown:
            refuse_arguments(unknown)
        # To its very end: a signal while the run or its model is saved must not end the process.
        with safe_streams(), self.stop.listening():
            return self._train()

    def _train(self) -> TrainResult:
        first, recorder = self.step_number, self.recorder
        result = TrainResult(first)
        try:
            recorder.started(first, loss=repr(self.model.loss), **self.scorer.facts)
            try:
                if text := self._over():
                    recorder.say(text)
                elif not recorder.quiet:
                    self._show_plan()
                if first and self.has_steps:
                    recorder.say(f"resuming after step {first}")
                if text := self.prompts.train.left_out():
                    recorder.warned(first, "rows_left_out", text)
                self._tell("on_start", self)
                if first == 0 and self.ended is None:
                    self._evaluate_first(result)
                while self.has_steps:
                    self._take_step(result)
            except Interrupted as signal_name:
                recorder.flush()
                self.snapshots.save(self.step_number, self.unfinished, self.ended)
                recorder.stopped(self.step_number, str(signal_name))
                result.status = "stopped"
            else:
                self.save_model()
                if self.ended is not None and self.step_number > first:
                    recorder.say(f"ended {self.ended.text} after step {self.step_number} of {self.ended.steps}")
                recorder.finished(self.step_number, self.ended and asdict(self.ended))
                result.status, result.ended = "done", self.ended
        except BaseException as error:
            self._rescue(error)
            recorder.failed(self.step_number, error)
            result.status = "failed"
            if isinstance(error, Exception):
                self._end(result)
                self._conclude()
            raise
        else:
            self._end(result)
        finally:
            self.close()
        self._conclude()
        return result

    def _evaluate_first(self, result: TrainResult) -> None:
        """The held-out score of the weights at the start."""
        result.before = self.evaluate()
        if result.before is None:
            return
        self.recorder.evaluated(0, result.before.metrics)
        if self._tell("on_evaluation", self, 0, result.before):
            self._end_early("callback")
            self.snapshots.save(0, ended=self.ended)

    @property
    def has_steps(self) -> bool:
        """True if the run has steps left to take."""
        return self.unfinished is not None or (self.ended is None and self.step_number < self.config.steps)

    def _over(self) -> str:
        """Message for a resumed run that has nothing left to do; "" if it continues."""
        if self.has_steps:
            return ""
        most = self.config.steps
        what = f"it has taken all of its {most} steps"
        if self.ended is not None:
            most = self.ended.steps
            what = f"it ended {self.ended.text} after step {self.step_number} of {most}"
        on = f"gruppo resume {shell_word(self.run.path)} --steps N, with N above {most}"
        return f"the run is done: {what}. To train on: {on}"

    def _take_step(self, result: TrainResult) -> None:
        """A step with its evaluation, record and checkpoint."""
        config, recorder = self.config, self.recorder
        started, self.watch.seconds = time.monotonic(), {}
        if self.unfinished is None:
            self.unfinished = self.step(record=recorder.writes_completions(self.step_number + 1))
            with self.watch("write"):
                recorder.sampled(self.step_number, self.groups, self._tokens and self._tokens.given_to(self.groups))
        metrics, number = dict(self.unfinished), self.step_number
        is_last = number == config.steps
        # A callback has ended the run already where a signal came between that and its evaluation.
        was_asked = is_asked = self.ended is not None
        is_due = was_asked or is_last or bool(config.eval_every and number % config.eval_every == 0)
        if is_due:
            is_asked |= self._evaluate_step(result, metrics)
        if not was_asked:
            is_asked |= self._tell("on_step", self, number, metrics)
        if is_asked and not is_last and not was_asked:
            self._end_early("callback")
            if not is_due:
                self._evaluate_step(result, metrics)
        if not is_last and self.ended is None and (by := self._ended_by(metrics)):
            self._end_early(by)
        if config.keep_best:
            self._save_best(number, metrics)
        recorder.step(number, metrics)
        self.unfinished = None
        faults.reach("recorded", number)
        if number % config.save_every == 0 or is_last or self.ended is not None:
            with self.watch("checkpoint"):
                recorder.flush()
                self.snapshots.save(number, ended=self.ended)
            recorder.checkpointed(number)
            self._tell("on_save", self, number)
        recorder.timed(number, self.watch.seconds, time.monotonic() - started)
        self.stop.poll()

    def _evaluate_step(self, result: TrainResult, metrics: dict[str, float]) -> bool:
        """Add the held-out score of a step to its metrics; True where a callback ends the run by it."""
        result.after = self.evaluate()
        if result.after is None:
            return False
        metrics |= result.after.metrics
        return self._tell("on_evaluation", self, self.step_number, result.after)

    def save_model(self, path: str | Path | None = None) -> Path:
        """Save model and tokenizer as transformers, PEFT and vLLM load them; returns the folder.

        Args:
            path: a new folder, or a model that gruppo saved, which is replaced. None: `model` in the run directory,
                which `train` also writes at its end.
        """
        own = self.run.model
        folder = own if path is None else at_home(path)
        if folder.resolve() == self.run.path.resolve():
            logger.warning("%s is the run directory; its model goes to %s", folder, own)
            folder = own
        if folder == own and own.exists() and self._saved == self.model.version:
            return own
        if folder != own and not is_free(folder, kind="model"):
            raise InputError(
                f"{folder} exists and is no model that gruppo saved; nothing was touched. Save to a new folder"
            )
        with replacing(folder):
            self.model.save(folder)
        if folder == own:
            self._saved = self.model.version
        return folder

    def push_to_hub(
        self,
        repo_id: str | None = None,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        **unknown: Never,
    ) -> str:
        """Save the model and upload its folder to the Hugging Face hub; returns the address of the repository.

        Args:
            repo_id: the repository, "you/name"; it is made if it does not exist.
            private: of a new repository. None: as the account has it.
            token: None: that of `hf auth login` or HF_TOKEN.
            revision: the branch. None: main.
        """
        if unknown:
            raise InputError(
                f"push_to_hub has no argument {next(iter(unknown))!r}: it uploads the model and writes no model card. "
                'Leave it out: trainer.push_to_hub("you/name")'
            )
        if not repo_id:
            raise InputError('push_to_hub needs the name of the repository: trainer.push_to_hub("you/name")')
        check_repository(repo_id)
        message = commit_message or f"Step {self.step_number} of a run of gruppo"
        return upload(self.save_model(), repo_id, private=private, token=token, revision=revision, message=message)

    def plan(self) -> RunEstimate:
        """Plan of the run, in numbers."""
        train, held_out = self.prompts.train, len(self.prompts.held_out)
        estimate = estimate_run(self.config, self.model, train.prompts)
        return replace(estimate, reading=train.reading, held_out=held_out, verdict=self.scorer.verdict)

    def _show_plan(self) -> None:
        """Print the plan. On a GPU it measures memory on a few tokens, for which the decoder blocks are compiled."""
        started, compiles = time.monotonic(), self.model.logp_model.compiled is not None
        if compiles:
            self.recorder.say("compiling the decoder blocks: half a minute to two minutes")
        lines = self.plan().lines(self.config)
        if compiles:
            self.recorder.say(f"compiled in {time.monotonic() - started:.0f} s")
        for line in lines:
            self.recorder.say(line)

    def close(self) -> None:
        """End the reward workers and the sampler, and give the run directory back."""
        self._opened.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise AttributeError(f"GRPOTrainer has no {name}: {METHODS[name]}")
            return object.__getattribute__(self, name)  # raises what it would have raised

    def _observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move what later steps depend on besides the weights. After the update: a stopped step leaves no trace."""
        config, state, seen = self.config, self.state, {}
        if config.advanced.retire_solved:
            state.solved.see([(g.prompt.index, [r.correct for r in g.rollouts]) for g in self.groups])
            seen["dynamic/prompts_retired"] = float(len(state.solved.retired))
        if config.kl_in_reward and "reward/kl" in metrics:
            state.kl.follow(metrics["reward/kl"], sum(len(g.rollouts) for g in self.kept))
        if config.advanced.entropy_target is not None:
            seen["policy/entropy_coef"] = self.model.loss.entropy_coef
            state.entropy.follow(metrics.get("rollout/entropy"))
        if state.reference is not None and self.step_number % config.ref_every == 0:
            state.reference.refresh(config.advanced.ref_mix)
        return seen

    def _rollouts(self, number: int) -> tuple[list[Group], dict[str, float]]:
        """All groups of a step, and their metrics."""
        if not self.config.max_staleness:
            taken = self.schedule.take(number)
            return taken.groups, taken.metrics
        with self.watch("wait"):
            taken = self.schedule.take(number)
        self.watch.seconds |= taken.seconds
        ages = [self.model.version - r.trajectory.versions[0] for g in taken.groups for r in g.rollouts]
        return taken.groups, taken.metrics | {"rollout/staleness": float(max(ages, default=0))}

    def _end(self, result: TrainResult) -> None:
        """Fill in the result and tell the callbacks. What they raise must not hide a failure or the code of a stop."""
        result.step = self.step_number
        try:
            result.metrics = self.run.metrics()
            self._tell("on_end", self, result)
        except Exception as problem:
            if result.status == "done":
                raise
            logger.warning("the callbacks were not told of the end: %s: %s", type(problem).__name__, problem)

    def _conclude(self) -> None:
        """Print the state of the run and its likely problems. An error in here is only logged, since the run is
        over."""
        if self.recorder.quiet:
            return
        try:
            self.recorder.flush()
            state, found = doctor.summary(self.run)
            found = [each for each in found if each.rule != "failed"]  # the error itself is printed
            for text in (state.text, *(f"{each.severity}: {each.text}. {each}" for each in found)):
                self.recorder.say(printable(text))
            if found:
                self.recorder.say(f"more: gruppo doctor {shell_word(self.run.path)}")
        except Exception as problem:
            logger.warning("the end of the run could not be looked at: %s", problem)

    def _rescue(self, error: BaseException) -> None:
        """Save what was learned before an error. Not where saving is what failed, a rank is lost that would have to
        save with this one, or the process is told to leave."""
        if not self.step_number or not isinstance(error, Exception) or isinstance(error, CheckpointError | RankError):
            return
        # Between two updates of a step, a run that goes on would not be the one that never stopped. After
        # non-finite gradients there is no such run, and the weights are those before them; else they are lost.
        is_before = self.learner.skipped_in_a_row >= MAX_SKIPPED
        if not is_before if isinstance(error, NumericError) else self.model.version != self._finished_version:
            return
        try:
            self.recorder.flush()
            self.snapshots.save(self.step_number, self.unfinished, self.ended)
        except Exception as problem:  # whatever it is, the error above is the one to report
            logger.warning("what was learned up to step %d could not be saved: %s", self.step_number, problem)
            return
        self.recorder.checkpointed(self.step_number)
        logger.warning(
            "step %d is saved; with the cause removed, go on with: gruppo resume %s",
            self.step_number,
            shell_word(self.run.path),
        )

    def _tell(self, hook: str, *arguments: Any) -> bool:
        """Call a hook of the callbacks; True where one ends the run."""
        if not self.callbacks:
            return False
        self.recorder.flush()  # they may read the completions of the step
        return tell(self.callbacks, hook, *arguments)

    def _ended_by(self, metrics: Mapping[str, float]) -> str:
        """ "score" where `stop_at_score` is reached, "patience" where that is at its end, else ""."""
        key, target, patience = held_out_key(metrics), self.config.advanced.stop_at_score, self.config.advanced.patience
        if key is None:
            return ""
        if target is not None and metrics[key] >= target:
            return "score"
        # From the records, so that a run that was stopped in between ends where it would have ended.
        scores = [*self._scores(key), metrics[key]]
        return "patience" if patience and len(scores) - 1 - scores.index(max(scores)) >= patience else ""

    def _end_early(self, by: str) -> None:
        """The run ends with this step: its checkpoint will say so."""
        limits = {"patience": float(self.config.advanced.patience), "score": self.config.advanced.stop_at_score}
        self.ended = Ending(by, self.config.steps, limits.get(by))

    def _scores(self, key: str) -> list[float]:
        """Held-out scores of the run so far, that of the start first."""
        return [line[key] for line in self.run.metrics() if line.get(key) is not None]

    def _save_best(self, number: int, metrics: Mapping[str, float]) -> None:
        """Save the model as the best so far, if it is better than at all evaluations before."""
        key = held_out_key(metrics)
        if key is not None and metrics[key] > max(self._scores(key), default=float("-inf")):
            with replacing(self.run.best):
                self.model.save(self.run.best)
            self.recorder.best(number, key, metrics[key])
