"""Whole runs, in real processes, with hostile rewards, trackers, model folders, checkpoints and clocks."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import steps_in
from safetensors.torch import load_file, save_file
from test_resume import product, tensor_hash
from warm_process import WarmProcess, gruppo

from gruppo.run.reader import RunReader
from gruppo.task.builtin import builtin_model_path
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Flags = Callable[..., list[str]]
Begin = Callable[..., WarmProcess]


def changed(arguments: list[str], changes: dict[str, Any], *plan: tuple[str, int, str]) -> None:
    """`gruppo` in a process with another environment, path, number of threads or clock."""
    import sys

    os.environ.update(changes.get("environment", {}))
    sys.path[:0] = changes.get("path", [])
    if "threads" in changes:
        torch.set_num_threads(changes["threads"])
    if "clock" in changes:
        jump, now = changes["clock"], time.time
        calls = iter(range(10**9))
        time.time = lambda: now() + jump * (-1) ** next(calls)
    gruppo(arguments, *plan)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start `gruppo WORDS` in a process with `changes`."""
    started: list[WarmProcess] = []

    def start(words: list[str], *plan: tuple[str, int, str], **changes: Any) -> WarmProcess:
        started.append(WarmProcess(tmp_path / f"process-{len(started)}.log", changed, words, changes, *plan))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    GRPOTrainer(TrainConfig(**short_run(run)), quiet=True).train()
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").glob("step-*"))


# --- how a run ended ----------------------------------------------------------------------------------------------


@pytest.mark.row("R-08", "ENOSPC before a checkpoint gets its name")
@pytest.mark.parametrize(
    ("fault", "code", "step", "error"),
    [
        (("train", 6, "raise"), 1, 6, "RuntimeError: fault planned at train of step 6"),
        (("filled", 10, "full"), 6, 10, "No space left on device"),
    ],
)
def test_the_status_of_a_run_that_failed_has_its_step_and_error(
    fault: tuple[str, int, str], code: int, step: int, error: str, begin: Begin, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = begin(["train", *flags(run)], fault)
    assert ended.wait() == code, ended.output
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", step)
    assert error in status["error"]
    assert not (run / "lock").exists()


@pytest.mark.row("R-03", "the status after SIGKILL")
def test_the_status_of_a_killed_run_is_killed_at_a_step_that_it_took(
    begin: Begin, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert begin(["train", *flags(run)], ("recorded", 7, "kill")).wait() == -signal.SIGKILL
    status = RunReader(run).status()
    assert status["status"] == "killed" and 5 <= status["step"] <= 7


# --- another machine ----------------------------------------------------------------------------------------------


@pytest.mark.row("R-02", "a run of one thread resumed with two")
def test_a_run_resumed_with_other_threads_says_so_and_goes_on_as_before(
    begin: Begin, flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    killed = begin(["train", *flags(run, threads=0)], ("recorded", 7, "kill"), threads=1)
    assert killed.wait() == -signal.SIGKILL
    resumed = begin(["resume", str(run)], threads=2)
    assert resumed.wait() == 0, resumed.output
    assert "it will not be bitwise identical: threads 1 -> 2" in resumed.output
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(21))
    # The first step after the checkpoint has its weights and draws; later ones may part with the last digits.
    assert lines[6] == pytest.approx(metrics(undisturbed)[6], rel=1e-3, abs=1e-6)


@pytest.mark.row("R-53", "time.time jumps by a year at every call")
def test_a_clock_that_jumps_changes_no_bit_and_no_duration(
    begin: Begin, flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    ended = begin(["train", *flags(run)], clock=365 * 86400.0)
    assert ended.wait() == 0, ended.output
    assert product(run) == product(undisturbed)
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    assert all(0 <= seconds < 120 for line in timings for name, seconds in line.items() if name != "step")


@pytest.mark.long
@pytest.mark.row("R-53", "SIGSTOP of trainer and workers for longer than the deadline of a reward")
def test_a_run_that_is_suspended_with_its_workers_ends_in_the_same_bits(
    begin: Begin, flags: Flags, tmp_path: Path
) -> None:
    # Steps enough that the run is not over before it is suspended, however late this process comes to it
    options = {"rewards": "campaign_rewards:short_and_right", "reward_deadline": 6, "steps": 80, "eval_prompts": 0}
    whole = begin(["train", *flags(tmp_path / "whole", **options)])
    assert whole.wait() == 0, whole.output
    run = tmp_path / "run"
    process = begin(["train", *flags(run, **options)])
    process.wait_until(lambda: steps_in(run) > 3)
    family = [psutil.Process(process.process.pid)]
    family += family[0].children(recursive=True)
    for each in family:
        each.suspend()
    time.sleep(8.0)
    for each in reversed(family):
        each.resume()
    assert process.wait() == 0, process.output
    assert tensor_hash(run / "model") == tensor_hash(tmp_path / "whole" / "model")


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.row("R-13", "one late call of a reward that compares completions")
def test_one_late_call_does_not_change_the_reward_of_later_steps(begin: Begin, flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"rewards": "run_rewards:compares", "reward_deadline": 1, "steps": 8, "eval_prompts": 0}
    late = {"GRUPPO_TEST_LATE": str(tmp_path / "late")}
    ended = begin(["train", *flags(run, **options)], environment=late)
    assert ended.wait() == 0, ended.output
    assert (tmp_path / "late").exists()
    assert all(line["reward/mean"] > 0.2 for line in metrics(run)[3:])


@pytest.mark.row("R-16", "a reward that raises after step 4")
def test_a_run_that_its_reward_stopped_is_saved_at_its_last_good_step(
    begin: Begin, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = {"rewards": "run_rewards:raises_after_step_4", "save_every": 50, "eval_prompts": 0}
    ended = begin(["train", *flags(run, **options)])
    assert ended.wait() == 4, ended.output
    assert "the judge is down" in ended.output
    assert checkpoints(run) == ["step-000004"]


@pytest.mark.row("R-48", "a reward error that quotes ANSI and OSC codes")
def test_control_characters_in_an_error_do_not_reach_the_terminal(begin: Begin, flags: Flags, tmp_path: Path) -> None:
    ended = begin(["train", *flags(tmp_path / "run", rewards="run_rewards:quotes_control_characters")])
    assert ended.wait() in (2, 4), ended.output
    assert "cannot read" in ended.output
    assert "\x1b" not in ended.output and "\x07" not in ended.output


# --- trackers -----------------------------------------------------------------------------------------------------

TRACKER = """
import sys, time

def init(**facts):
    {init}

def log(values, step):
    {log}

def finish():
    {finish}
"""


@pytest.mark.row("R-43", "a board that raises, exits or blocks")
@pytest.mark.parametrize(
    ("where", "does"),
    [
        ("log", "raise ConnectionError('no route')"),
        ("finish", "raise ConnectionError('no route')"),
        ("init", "raise ConnectionError('not logged in')"),
        ("init", "sys.exit(1)"),
        ("log", "time.sleep(1000)"),
        ("log", "sys.exit(1)"),
        ("finish", "time.sleep(1000)"),
    ],
)
def test_a_board_never_ends_or_holds_up_a_run(
    where: str, does: str, begin: Begin, flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    (tmp_path / "boards").mkdir()
    parts = dict.fromkeys(("init", "log", "finish"), "pass") | {where: does}
    (tmp_path / "boards" / "wandb.py").write_text(TRACKER.format(**parts))
    run = tmp_path / "run"
    ended = begin(["train", *flags(run, tracker_deadline=1), "--wandb"], path=[str(tmp_path / "boards")])
    assert ended.wait(60) == 0, ended.output
    assert product(run) == product(undisturbed)


# --- files of others ----------------------------------------------------------------------------------------------


def copy_of_builtin(tmp_path: Path) -> Path:
    shutil.copytree(builtin_model_path(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.row("R-44", "an index that names a pickle")
def test_an_index_that_names_a_pickle_is_refused_and_nothing_is_executed(
    begin: Begin, flags: Flags, tmp_path: Path
) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "canary",))

    folder = copy_of_builtin(tmp_path)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "weights.bin").write_bytes(pickle.dumps(Payload()))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "weights.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ended = begin(["train", *flags(tmp_path / "run", model=folder)])
    assert ended.wait() == 2, ended.output
    assert "weights.bin" in ended.output
    assert not (tmp_path / "canary").exists() and not (tmp_path / "run").exists()


@pytest.mark.row("R-46", "a config that names a kernel of the hub")
def test_a_config_that_names_a_kernel_is_refused(begin: Begin, flags: Flags, tmp_path: Path) -> None:
    folder = copy_of_builtin(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"_attn_implementation": "evil/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    ended = begin(["train", *flags(tmp_path / "run", model=folder)])
    assert ended.wait() == 2, ended.output
    assert "evil/kernel" in ended.output and "Traceback" not in ended.output


def rewrite(checkpoint: Path, file: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors of a checkpoint, with a hash in the manifest that fits."""
    tensors = {name: change(tensor) for name, tensor in load_file(checkpoint / file).items()}
    save_file(tensors, checkpoint / file)
    data = (checkpoint / file).read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        pytest.param(
            "weights.safetensors",
            lambda tensor: tensor.to(torch.int8),
            marks=pytest.mark.row("R-45", "weights of another type"),
        ),
        pytest.param(
            "optimizer.safetensors",
            lambda tensor: tensor * float("nan"),
            marks=pytest.mark.row("R-30", "NaN in the optimizer's file"),
        ),
    ],
    ids=["int8 weights", "NaN optimizer"],
)
def test_a_checkpoint_of_wrong_tensors_is_refused(
    file: str, change: Callable[..., Any], begin: Begin, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for checkpoint in (run / "checkpoints").iterdir():
        rewrite(checkpoint, file, change)
    ended = begin(["resume", str(run), "--steps", "21"])
    assert ended.wait() == 6, ended.output
    wrong = {"weights.safetensors": "holds torch.int8", "optimizer.safetensors": "holds non-finite numbers"}[file]
    assert wrong in ended.output and "Traceback" not in ended.output


# --- long runs ----------------------------------------------------------------------------------------------------


@pytest.mark.row("R-54", "195 steps with a worker that dies in some of them")
def test_memory_files_and_threads_of_a_long_run_do_not_grow(begin: Begin, flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"steps": 1000, "prompts_per_step": 2, "save_every": 100, "eval_prompts": 0, "completions_every": 1}
    process = begin(["train", *flags(run, **options, rewards="campaign_rewards:short_and_right")])
    seen: list[tuple[int, int, int]] = []
    trainer = psutil.Process(process.process.pid)
    for steps in (60, 195):
        process.wait_until(lambda steps=steps: steps_in(run) > steps)
        seen.append((trainer.memory_info().rss, trainer.num_fds(), trainer.num_threads()))
        for worker in trainer.children(recursive=True):
            worker.kill()
    process.send(signal.SIGTERM)
    assert process.wait() == 75, process.output
    (memory, files, threads), (later_memory, later_files, later_threads) = seen
    assert later_memory - memory < 16 * 2**20
    assert later_files <= files + 2 and later_threads <= threads + 1
