"""GRPOTrainer: the algorithm, one method per stage."""

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.errors import NumericError
from gruppo.sampler.params import SamplingParams
from gruppo.trainer import build, build_credit
from gruppo.trainer.advice import advice
from gruppo.trainer.collect import Collected, minibatch_parts, training_rows
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.console import RunConsole
from gruppo.trainer.evaluate import Evaluation, evaluate
from gruppo.trainer.plan import Plan, make_plan
from gruppo.trainer.run_dir import RunDir
from gruppo.trainer.signals import Interrupted, StopFlag
from gruppo.trainer.tracker import Trackers

logger = logging.getLogger(__name__)

MAX_SKIPPED = 3
"""Steps in a row whose gradient was not finite before the run stops."""

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

        from gruppo.model.source import load_tokenizer

        self.config = config
        self.callbacks = list(callbacks)
        self.quiet = quiet
        self.stop = StopFlag()
        if config.threads:
            torch.set_num_threads(config.threads)
        # Cheap checks first: a wrong option, reward or data row must not wait for a model to load.
        loss = build.build_loss(config)
        estimate = build_credit.build_advantage(config)
        self.pool = build.build_rewards(config, on_wait=self.stop.poll)
        tokenizer = load_tokenizer(config.model)
        self.prompts = build.build_prompts(config, tokenizer)
        self.pool.check_columns(sorted({name for p in self.prompts.train for name in p.columns}))
        self.unfinished: dict[str, float] | None = None
        """Metrics of a step that was taken and not yet recorded: its evaluation is still to be made."""
        self.collected: Collected | None = None
        self.seconds: dict[str, float] = {}
        self.synced: dict[str, float] = {}
        self.skipped_in_a_row = 0
        try:
            build.try_rewards(self.pool, self.prompts.train.prompts)
            self.run = RunDir.reopen(Path(config.output)) if resume else RunDir.create(config)
        except BaseException:
            self.pool.close()
            raise
        try:
            self.pool.start()
            self.model = build.build_model(config, loss, tokenizer)
            self.memory = build_credit.build_memory(config, self.model, len(self.prompts.train))
            self.step_number = self._restore() if resume else 0
            self.trackers = Trackers(config, self.run.path)
            folder = (self.run.path / "sync").resolve()  # a server reads it from another working directory
            self.sampler = build.build_sampler(config, self.model, self.prompts, folder, self.stop.poll)
            self.gatherer = build_credit.build_gatherer(
                config, self.prompts.train.prompts, self.sampler, self.pool, self.memory
            )
            self.credit = build_credit.build_credit(config, estimate, self.model, self.gatherer, self.memory)
        except BaseException:
            self.pool.close()
            if resume:
                self.run.release_lock()
            else:
                self.run.withdraw()  # else the next try would find its output used
            raise

    # --- one step: the algorithm ----------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Prompts -> rollouts -> rewards -> advantages -> update; returns the metrics of the step."""
        number = self.step_number + 1
        self.model.loss.entropy_coef = self.memory.entropy.applied
        self._sync()
        params = self._sampling(number)
        rounds = self.gatherer.gather(number, params, self._timed)
        with self._timed("reward"):
            collected = self.credit.give(rounds, number, params)
        with self._timed("train"):
            metrics = self.synced | collected.metrics | self.update(collected)
        self.credit.remember(rounds, number, metrics)
        self.step_number = number
        if self.config.completions_every and number % self.config.completions_every == 0:
            with self._timed("write"):
                self.run.write_completions(number, collected.groups)
        self.collected = collected
        return metrics

    def update(self, collected: Collected) -> dict[str, float]:
        """Train on one rollout batch: `epochs_per_batch` passes of `minibatches` optimizer steps.

        A single update is on-policy: the old log-probs are the trainer's own, so the ratio is exactly 1. With several
        updates they are computed once before the first, by the same code that trains.
        """
        rows = training_rows(collected, mask_truncated=self.config.mask_truncated)
        features, advantages, sampler_logps = rows["features"], rows["advantages"], rows["sampler_logps"]
        updates = self.config.epochs_per_batch * self.config.minibatches
        old_logps = self.model.forward_only(features)["logps"] if updates > 1 else None
        ref_logps = None
        if updates > 1 and "ref_logps" in self.model.loss.needs:
            ref_logps = self.model.reference_logps(features)
        parts = minibatch_parts(collected.groups, self.config.minibatches)
        losses, norms, lr, skipped = [], [], 0.0, 0
        for _ in range(self.config.epochs_per_batch):
            for part in parts:
                result = self.model.forward_backward(
                    features[part],
                    advantages=advantages[part],
                    old_logps=None if old_logps is None else old_logps[part],
                    ref_logps=None if ref_logps is None else ref_logps[part],
                    sampler_logps=sampler_logps[part],
                )
                report = self.model.clip_grad_and_step(self.config.max_grad_norm)
                losses.append({"loss": result.loss} | result.terms)
                norms.append(report.grad_norm)
                lr = report.lr
                skipped += self._count_skipped(report.skipped, report.culprit)
        # An update on sequences without signal has no terms.
        names = dict.fromkeys(name for x in losses for name in x)
        metrics = {f"policy/{name}": sum(float(x.get(name, 0.0)) for x in losses) / updates for name in names}
        finite = [n for n in norms if n == n and n != float("inf")]
        metrics |= {
            "optim/grad_norm": sum(finite) / len(finite) if finite else 0.0,
            "optim/lr": lr,
            "optim/skipped": float(skipped),
        }
        return metrics | self.model.calculate_metric()

    def evaluate(self) -> Evaluation | None:
        """The held-out score of the weights as they are; None without held-out prompts."""
        if not len(self.prompts.held_out):
            return None
        self._sync()
        with self._timed("eval"):
            return evaluate(
                self.prompts.held_out.prompts,
                self.sampler,
                self.pool,
                self._sampling(0),
                num_samples=self.config.eval_samples,
                correct_at=self.config.correct_at,
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
                            save_checkpoint(run, self.model, number, config.keep_checkpoints, memory=self.memory)
                        run.log_event("checkpoint", step=number)
                    run.log_timings(number, self.seconds)
                    self.trackers.log(number, metrics)
                    recent.append(metrics)
                    self._report(console, number, metrics, time.monotonic() - started, recent)
                    self.stop.poll()
                result.status = "done"
        except Interrupted as signal_name:
            save_checkpoint(
                run, self.model, self.step_number, config.keep_checkpoints, self.unfinished, memory=self.memory
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
        self.pool.close()
        self.sampler.close()
        self.trackers.close()
        self.run.release_lock()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """The newest weights to the sampler; what it reports stays until the next hand-over."""
        with self._timed("sync"):
            self.synced = self.sampler.sync(self.model) or self.synced

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

        step, self.unfinished = load_newest(self.run, self.model, self.memory)
        # The first evaluation is made again too, if there was no step after it.
        self.run.forget_after(step, redo_line=step == 0 or self.unfinished is not None)
        self.run.write_config(self.config)  # it may go on to another last step
        changes = self.run.environment_changes()
        if changes:
            logger.warning("resuming elsewhere, so not bit for bit: %s", ", ".join(changes))
            self.run.log_event("environment", step=step, changes=changes)
        return step

    def _count_skipped(self, skipped: bool, culprit: str | None) -> int:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NumericError(
                f"{MAX_SKIPPED} optimizer steps in a row had a non-finite gradient (first in {culprit}); the weights "
                "are those before them. Lower lr, or look at the completions of the last step"
            )
        return int(skipped)

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
            if self.collected is not None and (number == 1 or number % max(self.config.steps // 4, 1) == 0):
                console.completions(f"step {number}: best and worst of some groups", self.collected.groups, limit=3)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
