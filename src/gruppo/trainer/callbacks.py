"""Callbacks of a run: the hooks that `GRPOTrainer.train` calls, and callbacks of transformers behind them."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.keys import held_out_key
from gruppo.peer_names import TRL
from gruppo.process.by_name import did_you_mean
from gruppo.trainer.config import OPTIONS, TrainConfig

if TYPE_CHECKING:
    from gruppo.rollout.evaluate import Evaluation
    from gruppo.trainer.trainer import GRPOTrainer, TrainResult

logger = logging.getLogger(__name__)


class Callback:
    """Base of callbacks; override what you need. `on_step` alone can be a plain function.

    All hooks run in the process of the trainer, on its main thread, between two steps. What a callback keeps is not
    part of a checkpoint: a run that is resumed begins with the callbacks that the new trainer is given.
    """

    def on_start(self, trainer: "GRPOTrainer") -> None:
        """`train` begins; also in a resumed run, with `trainer.step_number` at the step it continues from."""

    def on_step(self, trainer: "GRPOTrainer", step: int, metrics: dict[str, float]) -> bool | None:
        """A step was taken; True ends the run after it."""

    def on_evaluation(self, trainer: "GRPOTrainer", step: int, evaluation: "Evaluation") -> bool | None:
        """The held-out prompts were scored, the first time before step 1 with step=0; True ends the run."""

    def on_save(self, trainer: "GRPOTrainer", step: int) -> None:
        """A checkpoint is on disk: one of `save_every`, or the last."""

    def on_end(self, trainer: "GRPOTrainer", result: "TrainResult") -> None:
        """`train` ends; `result.status` is done, stopped (by a signal) or failed. A killed process calls nothing.

        A run that is done has its model by now, and `train` raises what this raises. Otherwise it is logged.
        """


StepCallback = Callable[["GRPOTrainer", int, dict[str, float]], bool | None]
"""A function in the place of a callback: its `on_step`."""

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
GIVEN = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
"""Events of a `transformers.TrainerCallback` that a run has."""


def read_callbacks(given: Sequence[Any]) -> list[Any]:
    """Callbacks with hooks, of whatever may be given for one; an InputError for what no hook can call."""
    if callable(given) or not isinstance(given, Sequence):
        raise InputError(f"callbacks must be a list, got {given!r:.200}: GRPOTrainer(config, callbacks=[...])")
    return [_read(callback) for callback in given]


def tell(callbacks: Sequence[Any], hook: str, *arguments: Any) -> bool:
    """Call a hook of all callbacks; True where one of them asks for the end of the run."""
    return any([bool(call(*arguments)) for callback in callbacks if (call := _hook(callback, hook)) is not None])


def _hook(callback: Any, name: str) -> Callable[..., Any] | None:
    found = getattr(callback, name, None)
    has_hooks = any(hasattr(callback, hook) for hook in HOOKS)
    return callback if found is None and name == "on_step" and not has_hooks else found


def _read(callback: Any) -> Any:
    name = getattr(callback, "__name__", type(callback).__name__)
    if isinstance(callback, type):
        raise InputError(f"callbacks has the class {name}; give an instance: GRPOTrainer(config, callbacks=[{name}()])")
    # A class that nobody has imported has no instances: transformers need not be loaded for this.
    module: Any = sys.modules.get("transformers.trainer_callback")
    if module is not None and isinstance(callback, module.TrainerCallback):
        return _of_transformers(callback, module)
    events = [each for each in dir(type(callback)) if each.startswith("on_")]
    unknown = [each for each in events if each not in HOOKS]
    if isinstance(callback, Callback) and unknown:
        raise InputError(
            f"{name} has {unknown[0]}, which is no hook of a callback{did_you_mean(unknown[0], HOOKS)}; "
            f"there are {', '.join(HOOKS)}"
        )
    if not callable(callback) and not set(events) & set(HOOKS):
        raise InputError(
            f"callbacks has {callback!r:.200}, which cannot be called; give a function (trainer, step, metrics) that "
            "returns True to end the run, or an instance of a subclass of gruppo.trainer.Callback"
        )
    return callback


def _of_transformers(callback: Any, module: Any) -> "TransformersCallback":
    name = type(callback).__name__
    if isinstance(callback, module.EarlyStoppingCallback):
        wanted = f"patience={callback.early_stopping_patience}"
        raise InputError(f"{name} is an option here: TrainConfig({wanted}, eval_every=...)")
    events = [each for each in dir(module.TrainerCallback) if each.startswith("on_")]
    own = [e for e in events if getattr(type(callback), e) is not getattr(module.TrainerCallback, e)]
    if absent := [event for event in own if event not in GIVEN]:
        raise InputError(
            f"{name} overrides {', '.join(absent)}, which a run of gruppo does not have; it has {', '.join(GIVEN)}. "
            "Move the code to one of them, or write a gruppo.trainer.Callback"
        )
    return TransformersCallback(callback, module)


class TransformersCallback(Callback):
    """A `transformers.TrainerCallback` behind the hooks of a run: it gets transformers' own state and control.

    `global_step` counts steps of the run, an epoch is one pass over the prompts to train on, and metrics have the names
    of metrics.jsonl. Of `control` only `should_training_stop` acts: gruppo's options say what is saved and evaluated.
    """

    def __init__(self, callback: Any, module: Any) -> None:
        self.callback, self.state, self.control = callback, module.TrainerState(), module.TrainerControl()
        self.arguments: _Arguments | None = None
        self._told = 0
        """The last step that the callback knows of."""
        self._held: dict[str, float] | None = None
        """Metrics of an evaluation to tell it after its step, as transformers does."""
        self._has_warned = False

    def on_start(self, trainer: "GRPOTrainer") -> None:
        config, state = trainer.config, self.state
        self.arguments = _Arguments(config)
        state.max_steps, state.logging_steps = config.steps, 1
        state.eval_steps, state.save_steps = config.eval_every, config.save_every
        for line in trainer.run.metrics():
            self._place(trainer, line["step"])
            self._log(line)
        self._place(trainer, trainer.step_number)
        self._tell("on_train_begin", trainer)

    def on_step(self, trainer: "GRPOTrainer", step: int, metrics: dict[str, float]) -> bool:
        self._told = step
        self._place(trainer, step)
        self._tell("on_step_end", trainer)
        self._log(metrics)
        self._tell("on_log", trainer, logs=dict(metrics))
        self._tell_held(trainer)
        return self.control.should_training_stop

    def on_evaluation(self, trainer: "GRPOTrainer", step: int, evaluation: "Evaluation") -> bool:
        self._held = dict(evaluation.metrics)
        if step == self._told:
            self._place(trainer, step)
            self._log(self._held)
            self._tell_held(trainer)
        return self.control.should_training_stop

    def on_save(self, trainer: "GRPOTrainer", step: int) -> None:
        self._tell("on_save", trainer)

    def on_end(self, trainer: "GRPOTrainer", result: "TrainResult") -> None:
        self._tell_held(trainer)
        self._tell("on_train_end", trainer)

    def _tell_held(self, trainer: "GRPOTrainer") -> None:
        if self._held is not None:
            metrics, self._held = self._held, None
            self._tell("on_evaluate", trainer, metrics=metrics)

    def _place(self, trainer: "GRPOTrainer", step: int) -> None:
        self.state.global_step, self.state.epoch = step, step / trainer.scorer.steps_per_epoch

    def _log(self, metrics: Mapping[str, Any]) -> None:
        state = self.state
        state.log_history.append({**metrics, "step": state.global_step, "epoch": state.epoch})
        key = held_out_key(metrics)
        score = None if key is None else metrics[key]
        if score is not None and (state.best_metric is None or score > state.best_metric):
            state.best_metric, state.best_global_step = score, state.global_step

    def _tell(self, event: str, trainer: "GRPOTrainer", **more: Any) -> None:
        model = trainer.model
        own = {"model": model.model, "processing_class": model.tokenizer, "optimizer": model.optimizer}
        control = getattr(self.callback, event)(self.arguments, self.state, self.control, **own, **more)
        self.control = self.control if control is None else control
        asked = [n for n in ("should_save", "should_evaluate", "should_log", "should_epoch_stop") if self._take(n)]
        if asked and not self._has_warned:
            self._has_warned = True
            name = type(self.callback).__name__
            logger.warning(
                "%s sets control.%s, which does nothing here: save_every and eval_every say when", name, asked[0]
            )

    def _take(self, name: str) -> bool:
        asked = getattr(self.control, name)
        setattr(self.control, name, False)
        return asked


_NAMES = {theirs: own for theirs, own in TRL.items() if isinstance(own, str) and ": " not in own}
"""Options that mean the same here, by transformers' names."""


class _Arguments:
    """Stand-in for transformers' TrainingArguments: the options of the run under transformers' names."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        own = _NAMES.get(name, name)
        if own not in OPTIONS:
            raise AttributeError(
                f"args.{name} does not exist here: args has the options of gruppo's TrainConfig, also by their "
                "names in docs/coming_from.md"
            )
        return getattr(self.config if own in TrainConfig.model_fields else self.config.advanced, own)
