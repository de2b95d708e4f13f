"""Recorder: what each moment of a run leaves in its files, its boards and on the terminal."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from gruppo.doctor import advice
from gruppo.run.directory import RunDirectory
from gruppo.run.recorder import Recorder
from gruppo.run.trackers import Trackers
from gruppo.types import Group, GroupStatus, Prompt, Rollout, Trajectory

METRICS = {"reward/mean": 0.5, "group/dead_frac": 0.25, "completion/len_mean": 3.0, "optim/grad_norm": 0.125}


class Board:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def make(tmp_path: Path, board: Board) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def recorder(**options: Any) -> Recorder:
        run = RunDirectory.create(str(tmp_path / "run"), "steps: 8\n")
        made.append(Recorder(run, cast("Trackers", board), **{"steps": 8, "quiet": True, **options}))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def group(status: GroupStatus = "kept", text: str = "a") -> Group:
    prompt = Prompt(token_ids=(1,), text="ask")
    trajectory = Trajectory(prompt=prompt, tokens=(2,), text=text)
    rollouts = (
        Rollout(trajectory=trajectory, reward=1.0, advantage=0.5),
        Rollout(trajectory=trajectory, reward=0.0, advantage=-0.5),
    )
    return Group(prompt=prompt, rollouts=rollouts, status=status)


def events(recorder: Recorder) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k != "time"} for event in recorder.run.events()]


def test_a_run_from_start_to_end(make: Callable[..., Recorder], board: Board) -> None:
    recorder = make(completions_every=2)
    recorder.started(0)
    assert recorder.run.status() == {"status": "running", "step": 0}
    recorder.evaluated(0, {"eval/accuracy": 0.25})
    for number in (1, 2):
        recorder.sampled(number, [group(), group("surplus")])
        recorder.step(number, METRICS)
        recorder.flush()
        recorder.checkpointed(number)
        recorder.timed(number, {"train": 0.1234567}, 0.2)
    recorder.finished(2)
    recorder.close()
    assert recorder.run.status() == {"status": "done", "step": 2}
    assert recorder.run.metrics() == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, **dict(sorted(METRICS.items()))},
        {"step": 2, **dict(sorted(METRICS.items()))},
    ]
    assert recorder.run.timings() == [{"step": 1, "train": 0.123457}, {"step": 2, "train": 0.123457}]
    assert recorder.run.completion_steps() == [2]
    assert recorder.run.completions(2)["status"].to_pylist() == ["kept", "kept", "surplus", "surplus"]
    assert events(recorder) == [
        {"event": "start", "step": 0},
        {"event": "checkpoint", "step": 1},
        {"event": "checkpoint", "step": 2},
    ]
    assert board.logged == [(0, {"eval/accuracy": 0.25}), (1, METRICS), (2, METRICS)] and board.is_closed


def test_the_record_of_a_step_is_there_before_its_checkpoint(make: Callable[..., Recorder]) -> None:
    recorder = make()
    recorder.step(1, METRICS)
    assert [line["step"] for line in recorder.run.metrics()] == [1]
    assert recorder.run.timings() == []  # the checkpoint takes time too


def test_a_run_that_a_signal_stopped(make: Callable[..., Recorder]) -> None:
    recorder = make()
    recorder.stopped(3, "SIGTERM")
    assert recorder.run.status() == {"status": "stopped", "step": 3}
    assert events(recorder) == [{"event": "stop", "step": 3, "signal": "SIGTERM"}]


def test_a_run_that_failed_says_why(make: Callable[..., Recorder]) -> None:
    recorder = make()
    recorder.failed(4, ZeroDivisionError("by zero"))
    assert recorder.run.status() == {"status": "failed", "step": 4, "error": "ZeroDivisionError: by zero"}
    assert events(recorder) == [{"event": "failed", "step": 4, "error": "ZeroDivisionError: by zero"}]


def test_the_text_of_a_failure_is_kept_without_control_characters(make: Callable[..., Recorder]) -> None:
    recorder = make()
    recorder.failed(4, ValueError("server said \x1b[2J"))
    assert recorder.run.status()["error"] == "ValueError: server said \\x1b[2J"
    assert events(recorder)[0]["error"] == "ValueError: server said \\x1b[2J"


def test_a_warning_is_an_event_and_a_line_of_the_log(
    make: Callable[..., Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make()
    recorder.warned(2, "no_reward", "nothing was scored")
    assert events(recorder) == [{"event": "no_reward", "step": 2, "text": "nothing was scored"}]
    assert [r.getMessage() for r in caplog.records] == ["step 2: nothing was scored"]


def test_advice_comes_every_twenty_steps_from_the_last_twenty(
    make: Callable[..., Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = make(quiet=False, steps=100, advise=advice)
    recorder.started(0)
    for number in range(1, 42):
        recorder.step(number, METRICS | {"completion/truncated_frac": 1.0 if number <= 20 else 0.0})
        recorder.timed(number, {}, 0.0)
    recorder.close()
    text = (
        "completion/truncated_frac is 1, above 0.5: raise max_new_tokens, or reward shorter answers; if text goes on "
        "past its end, look at the end token"
    )
    assert [e for e in events(recorder) if e["event"] == "advice"] == [{"event": "advice", "step": 20, "text": text}]
    assert " ".join(capsys.readouterr().out.split()).count(f"note: {text}") == 1


def test_the_terminal_shows_a_line_per_step_and_completions_at_each_quarter(
    make: Callable[..., Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = make(quiet=False)
    recorder.started(0)
    for number in range(1, 5):
        recorder.sampled(number, [group(text=f"answer{number}"), group("surplus", text="unused")])
        recorder.step(number, METRICS)
        recorder.timed(number, {}, 0.25)
    recorder.close()
    out = capsys.readouterr().out
    assert "step 2/8  reward 0.500  signal 75%  grad 0.12  length 3  250 ms" in out
    shown = [f"answer{n}" in out for n in (1, 2, 3, 4)]
    assert shown == [True, True, False, True] and "unused" not in out


def test_a_quiet_run_prints_nothing(make: Callable[..., Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    recorder = make()
    recorder.started(0)
    recorder.sampled(1, [group()])
    recorder.step(1, METRICS)
    recorder.timed(1, {}, 0.25)
    recorder.close()
    assert capsys.readouterr().out == ""


def test_rollouts_beyond_the_limit_are_an_event_once(make: Callable[..., Recorder]) -> None:
    recorder = make(completions_limit=2)
    for number in (1, 2, 3):
        recorder.sampled(number, [group(), group(), group()][: 1 if number == 1 else 3])
    recorder.flush()
    assert events(recorder) == [
        {
            "event": "completions_limit",
            "step": 2,
            "rows_left_out": 4,
            "text": "completions_limit=2 leaves 4 rollouts out of the file of a step",
        }
    ]
