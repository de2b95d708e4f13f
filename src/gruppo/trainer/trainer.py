"""GRPOTrainer: the algorithm, one method per stage."""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import fsum
from pathlib import Path
from typing import Any

from gruppo.sampler.params import SamplingParams
from gruppo.trainer import build
from gruppo.trainer.advantages import kl_to_reference
from gruppo.trainer.advice import advice
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.console import RunConsole
from gruppo.trainer.evaluate import Evaluation, evaluate
from gruppo.trainer.plan import Plan, make_plan
from gruppo.trainer.rollout import RolloutBatch
from gruppo.trainer.run_dir import RunDir
from gruppo.trainer.signals import Interrupted, StopFlag
from gruppo.trainer.tracker import Trackers
from gruppo.types import Group, Rollout

logger = logging.getLogger(__name__)

Callback = Callable[["GRPOTrainer", int, dict[str, float]], bool | None]
"""Called after each step with (trainer, step, metrics); returning True ends the run."""


@dataclass(slots=True)
class TrainResult:
    """How a run ended."""

    step: int
    before: Evaluation | None
    after: Evaluation | None
    status: str
    metrics: list[dict[str, Any]] = field(default_factory=list)


class GRPOTrainer:
    """Trains a model with group-relative policy optimization.

        result = GRPOTrainer(TrainConfig(model="builtin", steps=50, output="runs/first")).train()

    The constructor checks everything and loads the model; `train` runs to the end, `step` takes one step.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        callbacks: Sequence[Callback] = (),
        resume: bool = False,
        quiet: bool = False,
    ) -> None:
        import torch

        from gruppo.weights.source import load_tokenizer

        self.config = config
        self.callbacks = list(callbacks)
        self.quiet = quiet
        self.stop = StopFlag()
        if config.threads:
            torch.set_num_threads(config.threads)
        # Cheap checks first: a wrong option, reward or data row must not wait for a model to load.
        loss = build.build_loss(config)
        estimate = build.build_advantage(config)
        self.scorer = build.build_rewards(config, poll=self.stop.poll)
        tokenizer = load_tokenizer(config.model)
        self.prompts = build.build_prompts(config, tokenizer)
        self.scorer.check_columns(sorted({name for p in self.prompts.train for name in p.columns}))
        self.unfinished: dict[str, float] | None = None
        """Metrics of a step that was taken and not yet recorded: its evaluation is still to be made."""
        self.batch: RolloutBatch | None = None
        """What the last step sampled, with its advantages."""
        self.seconds: dict[str, float] = {}
        self.synced: dict[str, float] = {}
        try:
            build.try_rewards(self.scorer, self.prompts.train.prompts)
            self.run = RunDir.reopen(Path(config.output)) if resume else RunDir.create(config)
        except BaseException:
            self.scorer.close()
            raise
        try:
            self.scorer.start()
            self.model = build.build_model(config, loss, tokenizer)
            self.state = build.build_state(config, self.model, len(self.prompts.train))
            self.step_number = self._restore() if resume else 0
            self.trackers = Trackers(config, self.run.path)
            folder = (self.run.path / "sync").resolve()  # a server reads it from another working directory
            self.sampler, self.store = build.build_sampler(config, self.model, self.prompts, folder, self.stop.poll)
            self.model.measures_gap = not self.sampler.is_exact or loss.reads_sampler
            self.learner = build.build_learner(config, self.model)
            self.stage = build.build_stage(config, estimate, self.scorer)
            self.source = build.build_source(
                config, self.prompts.train.prompts, self.sampler, self.scorer, self.stage, self.state
            )
        except BaseException:
            self.scorer.close()
            if resume:
                self.run.release_lock()
            else:
                self.run.withdraw()  # else the next try would find its output used
            raise

    # --- one step: the algorithm ----------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Prompts -> rollouts -> rewards -> advantages -> update; returns the metrics of the step."""
        number = self.step_number + 1
        self._sync()
        rollouts = self.source.next(number, self._sampling(number), self._timed)
        metrics = self.synced | rollouts.metrics
        if self.config.dynamic_sampling:
            metrics |= rollouts.counts
        if "reward/mean" not in metrics:
            self._warn_of_no_reward(number)
        with self._timed("reward"):
            groups, measured = self.assign_advantages(rollouts.kept)
        metrics |= measured
        entropy = metrics.get("rollout/entropy")
        self.model.set_loss(self.model.loss.replace(entropy_coef=self.state.entropy.at(entropy)))
        with self._timed("train"):
            metrics |= self.learner.update(groups)
        self.batch = rollouts.with_kept(groups)
        metrics |= {"group/dead_frac": self.batch.dead_frac} | self._observe(self.batch, number, metrics)
        self.step_number = number
        if self.config.completions_every and number % self.config.completions_every == 0:
            with self._timed("write"):
                self.run.write_completions(number, self.batch.groups)
        return metrics

    def assign_advantages(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """The groups of a step with their advantages, and what was measured on the way."""
        config, metrics = self.config, {}
        kl_coef = self.state.kl.coefficient if config.kl_in_reward else 0.0
        if config.kl_in_reward:
            groups = self._score(groups)
            kls = [kl_to_reference(rollout) for group in groups for rollout in group.rollouts]
            metrics |= {"reward/kl": fsum(kls) / max(len(kls), 1), "reward/kl_coef": kl_coef}
        assigned = self.stage.assign(groups, kl_coef)
        if config.kl_in_reward or not self.stage.shape.does_nothing:
            shaped = [r.shaped for group in assigned for r in group.rollouts if r.shaped is not None]
            if shaped:
                metrics["reward/shaped_mean"] = fsum(shaped) / len(shaped)
        return assigned, metrics

    def evaluate(self) -> Evaluation | None:
        """The held-out score of the weights as they are; None without held-out prompts."""
        if not len(self.prompts.held_out):
            return None
        self._sync()
        with self._timed("eval"):
            return evaluate(
                self.prompts.held_out.prompts,
                self.sampler,
                self.scorer,
                self._sampling(0),
                num_samples=self.config.eval_samples,
            )

    # --- the whole run --------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run to the last step (or a stop), save the model, return how it went."""
        from gruppo.trainer.checkpoints import save_checkpoint

        config, run = self.config, self.run
        console = RunConsole(config.steps, first_step=self.step_number) if not self.quiet else None
        recent: deque[dict[str, float]] = deque(maxlen=20)
        result = TrainResult(self.step_number, None, None, "running")
        first = self.step_number
        run.set_status("running", first)
        run.log_event("start", step=first)
        try:
            with self.stop.listening():
                if self.step_number == 0:
                    result.before = self.evaluate()
                    if result.before is not None:
                        run.log_metrics(0, result.before.metrics)
                        self.trackers.log(0, result.before.metrics)
                while result.status == "running" and (self.unfinished is not None or self.step_number < config.steps):
                    started = time.monotonic()
                    self.seconds = {}
                    if self.unfinished is None:
                        self.unfinished = self.step()
                    metrics = dict(self.unfinished)
                    number = self.step_number
                    is_last = number == config.steps
                    if is_last or (config.eval_every and number % config.eval_every == 0):
                        result.after = self.evaluate()
                        metrics |= result.after.metrics if result.after else {}
                    if self._should_end(number, metrics, result.after):
                        result.status = "done"
                    # The record before the checkpoint: a run that resumes after this step will not write it again.
                    run.log_metrics(number, metrics)
                    self.unfinished = None
                    if number % config.save_every == 0 or is_last or result.status == "done":
                        with self._timed("checkpoint"):
                            save_checkpoint(run, self.model, number, config.keep_checkpoints, run_state=self.state)
                        run.log_event("checkpoint", step=number)
                    run.log_timings(number, self.seconds)
                    self.trackers.log(number, metrics)
                    recent.append(metrics)
                    self._report(console, number, metrics, time.monotonic() - started, recent)
                    self.stop.poll()
                result.status = "done"
        except Interrupted as signal_name:
            save_checkpoint(
                run, self.model, self.step_number, config.keep_checkpoints, self.unfinished, run_state=self.state
            )
            run.log_event("stop", step=self.step_number, signal=str(signal_name))
            result.status = "stopped"
        except BaseException as error:
            run.log_event("failed", step=self.step_number, error=f"{type(error).__name__}: {error}")
            run.set_status("failed", self.step_number, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            if console is not None:
                console.close()
            self.close()
        if result.status == "done":
            if run.model.exists() and self.step_number > first:
                shutil.rmtree(run.model)  # of the run as it ended before it was resumed; the checkpoint has the weights
            if not run.model.exists():
                self.model.save(run.model)
        result.step = self.step_number
        result.metrics = run.metrics()
        run.set_status("done" if result.status == "done" else "stopped", self.step_number)
        return result

    def plan(self) -> Plan:
        """What the run will do, in numbers."""
        model = self.model.model
        config = model.config.get_text_config() if hasattr(model, "config") else None
        prompts = self.prompts.train.prompts
        return make_plan(
            self.config,
            num_prompts=len(prompts),
            mean_prompt_tokens=sum(len(p.token_ids) for p in prompts) / len(prompts),
            parameters=sum(p.numel() for p in model.parameters()),
            trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            hidden_size=getattr(config, "hidden_size", 0),
            num_layers=getattr(config, "num_hidden_layers", 0),
            vocabulary=getattr(config, "vocab_size", 0),
            is_cuda=self.model.device.type == "cuda",
        )

    def close(self) -> None:
        """End the reward workers and the sampler, and give the run directory back."""
        self.scorer.close()
        self.sampler.close()
        if self.store is not None:
            self.store.close()
        self.trackers.close()
        self.run.release_lock()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _score(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the log-probs of policy and reference, both by the code that trains.

        Equal completions of a group get the same numbers, whichever forward they came from.
        """
        rollouts = {(g.prompt.index, r.trajectory.tokens): r for g in groups for r in g.rollouts}
        policy = self.model.forward_only(list(rollouts.values()))["logps"]
        reference = self.model.reference_logps(list(rollouts.values()))
        pairs = ((tuple(p.tolist()), tuple(r.tolist())) for p, r in zip(policy, reference, strict=True))
        scored = dict(zip(rollouts, pairs, strict=True))

        def with_logps(group: Group, rollout: Rollout) -> Rollout:
            old, ref = scored[group.prompt.index, rollout.trajectory.tokens]
            return replace(rollout, old_logps=old, ref_logps=ref)

        return [replace(g, rollouts=tuple(with_logps(g, r) for r in g.rollouts)) for g in groups]

    def _warn_of_no_reward(self, number: int) -> None:
        text = "every reward function abstained (None) on every completion: the step teaches nothing"
        self.run.log_event("no_reward", step=number, text=text)
        logger.warning("step %d: %s", number, text)

    def _observe(self, rollouts: RolloutBatch, number: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move what later steps depend on besides the weights. After the update: a stopped step leaves no trace."""
        config, state, seen = self.config, self.state, {}
        if config.retire_solved:
            state.solved.see([(g.prompt.index, [r.correct for r in g.rollouts]) for g in rollouts.groups])
            seen["dynamic/prompts_retired"] = float(len(state.solved.retired))
        if config.kl_in_reward and "reward/kl" in metrics:
            state.kl.follow(metrics["reward/kl"], sum(len(g.rollouts) for g in rollouts.kept))
        if state.entropy.rule is not None:
            seen["policy/entropy_coef"] = self.model.loss.entropy_coef
            state.entropy.follow(metrics.get("rollout/entropy"))
        if state.reference is not None and number % config.ref_every == 0:
            state.reference.refresh(config.ref_mix)
        return seen

    def _sync(self) -> None:
        """Publish the newest weights and load them into the sampler; its report stays until the next hand-over."""
        with self._timed("sync"):
            if self.store is not None:
                self.synced = self.store.hand_over(self.model, self.sampler) or self.synced

    def _sampling(self, step: int) -> SamplingParams:
        config = self.config
        return SamplingParams(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=config.stop,
            seed=config.seed,
            step=step,
        )

    def _restore(self) -> int:
        from gruppo.trainer.checkpoints import load_newest

        step, self.unfinished = load_newest(self.run, self.model, self.state)
        # The first evaluation is made again too, if there was no step after it.
        self.run.forget_after(step, redo_line=step == 0 or self.unfinished is not None)
        self.run.write_config(self.config)  # it may go on to another last step
        changes = self.run.environment_changes()
        if changes:
            logger.warning("resuming elsewhere, so not bit for bit: %s", ", ".join(changes))
            self.run.log_event("environment", step=step, changes=changes)
        return step

    def _should_end(self, number: int, metrics: dict[str, float], evaluation: Evaluation | None) -> bool:
        asked = [bool(callback(self, number, metrics)) for callback in self.callbacks]
        target = self.config.stop_at_score
        reached = target is not None and "eval/accuracy" in metrics and metrics["eval/accuracy"] >= target
        return any(asked) or reached

    def _report(
        self, console: RunConsole | None, number: int, metrics: dict[str, float], seconds: float, recent: Any
    ) -> None:
        if number % 20 == 0:
            for sentence in advice(list(recent)):
                self.run.log_event("advice", step=number, text=sentence)
                if console is not None:
                    console.say(f"note: {sentence}")
        if console is not None:
            console.step(number, metrics, seconds)
            if self.batch is not None and (number == 1 or number % max(self.config.steps // 4, 1) == 0):
                console.completions(f"step {number}: best and worst of some groups", self.batch.kept, limit=3)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
