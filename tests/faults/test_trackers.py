"""R-43: trackers that block, raise or exit, as modules that a real run imports; the run goes on without them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_process import WarmProcess, can_mount, mount

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Flags = Callable[..., list[str]]

FAULTS = {
    "blocks": "time.sleep(1000)",
    "raises": "raise ConnectionError('not logged in \\x1b[2J')",
    "exits": "sys.exit(0)",
}
PLACES = ("import", "init", "log", "finish")

MODULE = """
import json, os, sys, time

def fault(place):
    if place == {place!r}:
        {fault}

fault("import")

def init(project, name, config):
    fault("init")

def log(metrics, step):
    fault("log")
    with open(os.path.join({folder!r}, "board.jsonl"), "a") as file:
        file.write(json.dumps({{"step": step, **metrics}}, sort_keys=True) + "\\n")

def finish():
    fault("finish")
    with open(os.path.join({folder!r}, "finished"), "w") as file:
        pass
"""

WRITER = """
import sys, time

class RecordWriter:
    def __init__(self, file):
        {fault}
"""


@pytest.fixture
def run(start: Start, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Train with a tracker; what was printed. The run must have ended well, and in time."""
    monkeypatch.syspath_prepend(tmp_path)

    def train(*words: str, **options: object) -> str:
        process = start(["train", *flags(tmp_path / "run", steps=4, eval_prompts=0, **options), *words])
        assert process.wait(60) == 0, process.output
        assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"status": "done", "step": 4}
        assert (tmp_path / "run" / "model" / "model.safetensors").exists()
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
        assert "Traceback" not in process.output
        return process.output

    return train


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_tracker_in_trouble_is_dropped_with_one_line(
    fault: str, place: str, run: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "wandb.py").write_text(MODULE.format(place=place, fault=FAULTS[fault], folder=str(tmp_path)))
    text = run("--wandb", tracker_deadline=1 if fault == "blocks" else 60)
    doing = "init" if place == "import" else place
    ended = {"raises": r"raised ConnectionError: not logged in \x1b[2J", "exits": "raised SystemExit: 0"}
    lines = [line for line in text.splitlines() if "wandb failed and is switched off" in line]
    if fault == "blocks":
        assert lines in (
            [f"wandb failed and is switched off: {doing} took longer than tracker_deadline=1 s"],
            [f"wandb failed and is switched off: {doing} did not end within tracker_deadline=1 s"],
        )
    else:
        assert lines == [f"wandb failed and is switched off: {doing} {ended[fault]}"]


@pytest.mark.parametrize("fault", FAULTS)
def test_tensorboard_in_trouble_is_dropped_with_one_line(fault: str, run: Callable[..., str], tmp_path: Path) -> None:
    files = {
        "summary/writer/record_writer.py": WRITER.format(fault=FAULTS[fault]),
        "compat/proto/event_pb2.py": "Event = None",
        "compat/proto/summary_pb2.py": "Summary = None",
    }
    for name, text in files.items():
        file = tmp_path / "tensorboard" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for package in file.parents[:3]:
            (package / "__init__.py").touch()
    text = run(tensorboard=True, tracker_deadline=0.5 if fault == "blocks" else 60)
    (line,) = [line for line in text.splitlines() if "tensorboard failed and is switched off: " in line]
    reasons = {
        "blocks": ("init took longer than tracker_deadline=0.5 s", "init did not end within tracker_deadline=0.5 s"),
        "raises": (r"init raised ConnectionError: not logged in \x1b[2J",),
        "exits": ("init raised SystemExit: 0",),
    }
    assert line.partition("switched off: ")[2] in reasons[fault]


def board_on_full_disk(disk: str, num_records: int) -> None:
    """Records for TensorBoard on a disk of 8 kB."""
    from gruppo.run.trackers import Trackers

    mount(disk, "size=8k")
    trackers = Trackers(["tensorboard"], Path(disk), {}, deadline_s=60.0)
    for step in range(num_records):
        trackers.log(step, {f"metric/{i}": 0.5 for i in range(100)})
    trackers.close()


@pytest.mark.parametrize("num_records", [6, 40])
def test_tensorboard_on_a_full_disk_is_one_line(num_records: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    tried = WarmProcess(tmp_path / "tried", can_mount, str(disk))
    if tried.wait():
        pytest.skip("a process may not mount a file system of its own here")
    process = WarmProcess(tmp_path / "log", board_on_full_disk, str(disk), num_records)
    assert process.wait(60) == 0, process.output
    for each in (tried, process):
        each.close()
    (line,) = process.output.splitlines()
    assert line.startswith("tensorboard failed and is switched off: log raised OSError: ") and "No space left" in line


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_slow_tracker_gets_every_record_in_order(name: str, run: Callable[..., str], tmp_path: Path) -> None:
    slow = MODULE.format(place="log", fault="time.sleep(0.15)", folder=str(tmp_path))
    (tmp_path / f"{name}.py").write_text(slow)
    assert "switched off" not in run(f"--{name}")
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in (tmp_path / "board.jsonl").read_text().splitlines()] == written
    assert (tmp_path / "finished").exists()


def test_a_stop_is_saved_though_a_tracker_blocks(start: Start, flags: Flags, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wandb.py").write_text(MODULE.format(place="log", fault=FAULTS["blocks"], folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    words = flags(tmp_path / "run", eval_prompts=0, tracker_deadline=1)
    process = start(["train", *words, "--wandb"], ("recorded", 7, "term"))
    assert process.wait(60) == 75, process.output
    assert process.output.count("wandb failed and is switched off: log ") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-000007").exists()
