"""RunReader: what a run wrote comes back, also while it is being written, and damage is named."""

import json
import logging
from pathlib import Path

import pytest

from gruppo.errors import InputError
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader, numbered
from gruppo.types import Group, Prompt, Rollout, Trajectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path / "run"), "loss: dapo\nclip_range: [0.2, 0.28]\noutput: elsewhere\n")


def test_everything_that_was_written_is_read(run: RunDirectory) -> None:
    prompt = Prompt(token_ids=(1,))
    group = Group(prompt=prompt, rollouts=(Rollout(trajectory=Trajectory(prompt=prompt, tokens=(2, 3)), reward=0.5),))
    run.set_status("failed", 7, error="ValueError: no")
    run.log_metrics(1, {"reward/mean": 0.25})
    run.log_timings(1, {"sample": 0.5})
    run.log_event("checkpoint", step=1)
    run.write_completions(1, [group])
    run.write_completions(12, [group])
    reader = RunReader(str(run.path))
    assert reader.config() == {"loss": "dapo", "clip_range": [0.2, 0.28], "output": str(run.path)}
    assert reader.status() == {"status": "failed", "step": 7, "error": "ValueError: no"}
    assert reader.environment()["threads"] == 1
    assert reader.metrics() == [{"step": 1, "reward/mean": 0.25}]
    assert reader.timings() == [{"step": 1, "sample": 0.5}]
    assert [(e["event"], e["step"]) for e in reader.events()] == [("checkpoint", 1)]
    assert reader.completion_steps() == [1, 12]
    assert reader.completions(12).select(["step", "tokens", "reward"]).to_pylist() == [
        {"step": 12, "tokens": [2, 3], "reward": 0.5}
    ]


def test_a_run_that_has_written_nothing_yet_is_empty(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert (reader.metrics(), reader.timings(), reader.events()) == ([], [], [])
    assert (reader.completion_steps(), reader.checkpoint_steps()) == ([], [])


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.yaml"):
        RunReader(tmp_path).config()
    with pytest.raises(InputError, match=r"status\.json cannot be read"):
        RunReader(tmp_path).status()


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_last_line_that_is_being_written_is_left_out_wherever_it_is_cut(
    cut: int, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    line = b'{"step": 2, "x": 1}'
    (run.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line[:cut])
    assert run.metrics() == [{"step": 1}]
    assert not caplog.records


def test_a_line_damaged_in_the_middle_is_named_and_hides_no_other(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    (run.path / "events.jsonl").write_bytes(b'{"event": "start"}\n{"event": \xff\n{"event": "stop"}\n')
    with caplog.at_level(logging.WARNING):
        assert [e["event"] for e in run.events()] == ["start", "stop"]
    assert [r.getMessage() for r in caplog.records] == [f"{run.path / 'events.jsonl'}:2 is damaged and left out"]


def test_an_event_cut_off_by_a_crash_does_not_swallow_the_next(run: RunDirectory) -> None:
    run.log_event("start", step=0)
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"time": "2026')
    run.forget_after(0)
    run.log_event("start", step=0)
    lines = (run.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "start"]


def test_completions_that_are_not_there_or_not_whole_are_named(run: RunDirectory) -> None:
    with pytest.raises(InputError, match=r"has no completions of step 3; it has \[\]"):
        run.completions(3)
    (run.path / "completions").mkdir()
    (run.path / "completions" / "step-000003.parquet").write_bytes(b"PAR1half")
    with pytest.raises(InputError, match=r"step-000003\.parquet cannot be read"):
        run.completions(3)


def test_a_checkpoint_counts_once_it_has_its_manifest(run: RunDirectory) -> None:
    for name in ("step-000010", "step-000005", "step-000015", ".step-000020.tmp-1", "step-x", "notes"):
        (run.checkpoints / name).mkdir(parents=True)
    for name in ("step-000010", "step-000005", ".step-000020.tmp-1"):
        (run.checkpoints / name / "manifest.json").write_text("{}")
    assert run.checkpoint_steps() == [5, 10]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for name in ("step-999999", "step-1000000", "step-000002.parquet", "step-000002.parquet.tmp", "xstep-3"):
        (tmp_path / name).mkdir()
    assert sorted(numbered(tmp_path)) == [2, 999_999, 1_000_000]
