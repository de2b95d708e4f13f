"""Callbacks: what each hook gets and when, those of transformers, and what is refused."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import InputError
from gruppo.rollout.evaluate import Evaluation
from gruppo.run.reader import RunReader
from gruppo.trainer import Callback, GRPOTrainer, TrainConfig
from gruppo.trainer.trainer import TrainResult

Make = Callable[..., GRPOTrainer]

HELD_OUT: dict[str, Any] = {"eval_prompts": 8}


class Diary(Callback):
    """Writes down its calls; ends the run where it is told to."""

    def __init__(self, end_at: Sequence[tuple[str, int]] = ()) -> None:
        self.calls: list[Any] = []
        self.end_at = end_at

    def on_start(self, trainer: GRPOTrainer) -> None:
        self.calls.append(("start", trainer.step_number))

    def on_step(self, trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> bool:
        self.calls.append(("step", step, "eval/accuracy" in metrics))
        return ("step", step) in self.end_at

    def on_evaluation(self, trainer: GRPOTrainer, step: int, evaluation: Evaluation) -> bool:
        self.calls.append(("evaluation", step, len(evaluation.greedy)))
        return ("evaluation", step) in self.end_at

    def on_save(self, trainer: GRPOTrainer, step: int) -> None:
        assert (trainer.run.checkpoints / f"step-{step:06d}" / "manifest.json").is_file()
        self.calls.append(("save", step))

    def on_end(self, trainer: GRPOTrainer, result: TrainResult) -> None:
        self.calls.append(("end", result.status, result.step, trainer.run.model.exists()))


def test_each_hook_is_called_when_it_says(make_trainer: Make) -> None:
    diary = Diary()
    make_trainer(steps=3, eval_every=2, save_every=2, callbacks=[diary], **HELD_OUT).train()
    assert diary.calls == [
        ("start", 0),
        ("evaluation", 0, 8),
        ("step", 1, False),
        ("evaluation", 2, 8),
        ("step", 2, True),
        ("save", 2),
        ("evaluation", 3, 8),
        ("step", 3, True),
        ("save", 3),
        ("end", "done", 3, True),
    ]


def test_a_run_that_a_callback_ends_is_evaluated_and_says_so(
    small_config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    diary = Diary(end_at=[("step", 2)])
    trainer = GRPOTrainer(small_config(steps=6, keep_best=True, eval_every=5, **HELD_OUT), callbacks=[diary])
    result = trainer.train()
    assert diary.calls[-4:] == [("step", 2, False), ("evaluation", 2, 8), ("save", 2), ("end", "done", 2, True)]
    assert result.before is not None and result.after is not None
    last = RunReader(trainer.run.path).metrics()[-1]
    assert (last["step"], last["eval/accuracy"]) == (2, result.after.accuracy)
    assert repr(result).startswith("TrainResult(done after step 2 of 6, ended by a callback, held-out ")
    assert trainer.run.status()["ended"] == {"by": "callback", "steps": 6, "limit": None}
    assert "ended by a callback after step 2 of 6" in capsys.readouterr().out


def test_the_best_model_may_be_that_of_the_evaluation_by_which_a_callback_ends_a_run(make_trainer: Make) -> None:
    trainer = make_trainer(
        steps=6, lr=3e-3, keep_best=True, eval_every=5, callbacks=[lambda t, s, m: s == 3], eval_prompts=40
    )
    result = trainer.train()
    assert result.before is not None and result.after is not None
    assert result.after.accuracy > result.before.accuracy  # what this test rests on
    assert [(e["step"], e["score"]) for e in trainer.run.events() if e["event"] == "best"] == [
        (3, result.after.accuracy)
    ]


def test_an_evaluation_can_end_a_run_also_that_before_the_first_step(make_trainer: Make, tmp_path: Path) -> None:
    later = make_trainer(steps=6, eval_every=2, callbacks=[Diary([("evaluation", 2)])], **HELD_OUT)
    assert repr(later.train()).startswith("TrainResult(done after step 2 of 6, ended by a callback")
    options: dict[str, Any] = {"steps": 2, "output": str(tmp_path / "none")} | HELD_OUT
    first = make_trainer(**options, callbacks=[Diary([("evaluation", 0)])]).train()
    assert (first.step, first.after, [line["step"] for line in first.metrics]) == (0, None, [0])
    again = make_trainer(**options, resume=True).train()
    assert (again.step, [line["step"] for line in again.metrics]) == (0, [0])
    on = make_trainer(**options | {"steps": 3}, resume=True).train()
    assert (on.step, [line["step"] for line in on.metrics]) == (3, [0, 1, 2, 3])


def test_a_resumed_run_has_a_start_of_its_own_and_no_end_is_called_twice(make_trainer: Make) -> None:
    first, second = Diary([("step", 1)]), Diary()
    make_trainer(steps=3, callbacks=[first]).train()
    make_trainer(steps=4, callbacks=[second], resume=True).train()
    assert [call[:2] for call in second.calls] == [
        *(("start", 1), ("step", 2), ("step", 3), ("step", 4), ("save", 4), ("end", "done")),
    ]


def test_the_end_is_told_of_a_stop_and_of_a_failure_and_cannot_hide_either(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Diary):
        def on_end(self, trainer: GRPOTrainer, result: TrainResult) -> None:
            super().on_end(trainer, result)
            raise RuntimeError("no room to write")

    def fail(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        raise ValueError("a callback fails")

    def stop(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        trainer.stop.signal = 15

    ends = []
    for name, own in (("failed", fail), ("stopped", stop), ("done", None)):
        diary = Breaks()
        trainer = make_trainer(output=str(tmp_path / name), callbacks=[diary, *([own] if own else [])])
        if name == "stopped":
            assert trainer.train().status == "stopped"
        else:
            wanted = "a callback fails" if name == "failed" else "no room to write"
            with pytest.raises((ValueError, RuntimeError), match=wanted):
                trainer.train()
        ends.append(diary.calls[-1])
        assert RunReader(trainer.run.path).status()["status"] == name
    assert ends == [("end", "failed", 1, False), ("end", "stopped", 1, False), ("end", "done", 3, True)]
    assert [r.getMessage() for r in caplog.records].count(
        "the callbacks were not told of the end: RuntimeError: no room to write"
    ) == 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Diary, "callbacks has the class Diary; give an instance: GRPOTrainer(config, callbacks=[Diary()])"),
        (3, "callbacks has 3, which cannot be called; give a function (trainer, step, metrics)"),
        (object(), "which cannot be called; give a function (trainer, step, metrics)"),
        (type("Late", (Callback,), {"on_stop": print})(), "Late has on_stop, which is no hook of a callback (did you"),
    ],
)
def test_what_no_hook_can_call_is_refused_before_a_model_is_loaded(given: Any, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        GRPOTrainer(TrainConfig(model="no/such", output=str(tmp_path / "run")), callbacks=[given])
    assert wanted in str(error.value)
    assert not (tmp_path / "run").exists()


def test_callbacks_that_are_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"callbacks must be a list, got .*: GRPOTrainer\(config, callbacks=\[...\]\)"):
        GRPOTrainer(TrainConfig(output=str(tmp_path / "run")), callbacks=print)  # type: ignore[arg-type]


def test_an_object_with_a_hook_needs_no_base_class(make_trainer: Make) -> None:
    class Plain:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_step(self, trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> bool:
            self.seen.append(step)
            return step == 2

    plain = Plain()
    make_trainer(callbacks=[plain]).train()
    assert plain.seen == [1, 2]


def test_importing_the_trainer_does_not_import_transformers() -> None:
    code = "import gruppo.trainer, sys; gruppo.trainer.Callback; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- callbacks of transformers --------------------------------------------------------------------------------------


def test_a_callback_of_transformers_gets_the_events_and_the_state_of_transformers(make_trainer: Make) -> None:
    from transformers import TrainerCallback, TrainerControl, TrainerState

    calls: list[Any] = []

    class Theirs(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            assert isinstance(state, TrainerState) and isinstance(control, TrainerControl)
            calls.append(("begin", state.global_step, state.max_steps, args.output_dir, args.learning_rate))
            assert sum(p.numel() for p in model.parameters()) > 100_000 and more["processing_class"].eos_token_id >= 0

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            calls.append(("step", state.global_step, state.epoch))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
            calls.append(("log", logs["reward/mean"], state.log_history[-1]["step"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
            calls.append(("evaluate", state.global_step, metrics["eval/accuracy"], state.best_metric))

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            calls.append(("save", state.global_step))

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            calls.append(("end", state.global_step, [line["step"] for line in state.log_history]))

    trainer = make_trainer(steps=2, eval_every=2, callbacks=[Theirs()], **HELD_OUT)
    result = trainer.train()
    start, first, second = result.metrics
    epoch = 4 / len(trainer.prompts.train)  # prompts of a step, of all
    scores = [start["eval/accuracy"], second["eval/accuracy"]]
    assert calls == [
        ("begin", 0, 2, trainer.config.output, 1e-4),
        ("evaluate", 0, scores[0], scores[0]),
        ("step", 1, epoch),
        ("log", first["reward/mean"], 1),
        ("step", 2, 2 * epoch),
        ("log", second["reward/mean"], 2),
        ("evaluate", 2, scores[1], max(scores)),
        ("save", 2),
        ("end", 2, [0, 1, 2]),
    ]


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_evaluate", "on_train_begin"])
def test_control_of_transformers_ends_the_run(event: str, make_trainer: Make) -> None:
    from transformers import TrainerCallback

    def stop(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = state.global_step >= (0 if event == "on_train_begin" else 2)
        return control

    theirs = type("Theirs", (TrainerCallback,), {event: stop})()
    result = make_trainer(steps=5, eval_every=2, callbacks=[theirs], **HELD_OUT).train()
    assert (result.step, result.ended and result.ended.by) == (0 if event == "on_train_begin" else 2, "callback")


def test_a_resumed_run_gives_transformers_the_history_of_the_run(make_trainer: Make) -> None:
    from transformers import TrainerCallback

    seen: list[Any] = []

    class Theirs(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.extend([state.global_step, [line["step"] for line in state.log_history], state.best_metric])

    scores = [
        m["eval/accuracy"] for m in make_trainer(steps=2, eval_every=2, **HELD_OUT).train().metrics if m["step"] != 1
    ]
    make_trainer(steps=3, eval_every=2, callbacks=[Theirs()], resume=True, **HELD_OUT).train()
    assert seen == [2, [0, 1, 2], max(scores)]


def test_what_a_run_has_no_event_for_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback, TrainerCallback

    class Theirs(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...
        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...
        def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...

    cases = {
        "Theirs overrides on_epoch_end, on_substep_end, which a run of gruppo does not have; it has on_train": Theirs(),
        "callbacks has the class Theirs; give an instance": Theirs,
        "EarlyStoppingCallback is an option here: TrainConfig(patience=3, eval_every": EarlyStoppingCallback(3),
    }
    for wanted, given in cases.items():
        with pytest.raises(InputError) as error:
            GRPOTrainer(TrainConfig(model="no/such", output=str(tmp_path / "run")), callbacks=[given])
        assert wanted in str(error.value)


def test_what_a_callback_of_transformers_asks_for_in_vain_is_said(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import TrainerCallback

    class Theirs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_save = True
            with pytest.raises(AttributeError, match=r"args.logging_steps does not exist here"):
                _ = args.logging_steps

    make_trainer(callbacks=[Theirs()]).train()
    said = [r.getMessage() for r in caplog.records if "control.should_save" in r.getMessage()]
    assert said == ["Theirs sets control.should_save, which does nothing here: save_every and eval_every say when"]
