"""R-01, R-03 to R-06, R-08, R-11, R-55: runs that are killed, stopped, damaged or doubled end in the same bits."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm_process import WarmProcess

from gruppo.cli.main import main
from gruppo.run import lock
from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Flags = Callable[..., list[str]]
VARIANTS = {
    "full": {},
    "lora": {"lora": True, "lora_rank": 4, "beta": 0.01},
    "whole": {"lora": True, "lora_modules_to_save": ["norm"], "beta": 0.01, "ref_every": 3},
    "records": {"completions_every": 1},
    "dynamic": {"dynamic_sampling": 2, "retire_solved": 1, "kl_in_reward": 0.01, "kl_target": 0.1, "ref_every": 3},
}
VARIANTS["ahead"] = {"max_staleness": 2, "dynamic_sampling": 2, "retire_solved": 1, "eval_every": 5}
VARIANTS["ahead by 1"] = VARIANTS["ahead"] | {"max_staleness": 1}
if find_spec("bitsandbytes") is not None:
    VARIANTS["4 bits"] = {"lora": True, "quantize": "nf4", "beta": 0.01}


def tensor_hash(folder: Path) -> str:
    """sha256 over all tensors of a model folder, by name."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def product(run: Path) -> tuple[bytes, str, dict[str, bytes]]:
    """What must be equal between two runs."""
    completions = {path.name: path.read_bytes() for path in sorted((run / "completions").iterdir())}
    return (run / "metrics.jsonl").read_bytes(), tensor_hash(run / "model"), completions


def tree_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Undisturbed(dict[str, Path]):
    """The runs that were not killed, each made when it is first asked for."""

    def __init__(self, folder: Path, short_run: Callable[..., dict[str, Any]]) -> None:
        self.folder, self.short_run = folder, short_run

    def __missing__(self, name: str) -> Path:
        run = self.folder / name
        GRPOTrainer(TrainConfig(**self.short_run(run, **VARIANTS[name])), quiet=True).train()
        return self.setdefault(name, run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> dict[str, Path]:
    return Undisturbed(tmp_path_factory.mktemp("whole"), short_run)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.row("R-01", "SIGKILL after step 7 of 20")
def test_killed_at_step_7_of_20_and_resumed_is_bitwise_the_run_that_was_not(
    variant: str, whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert start(["train", *flags(run, **VARIANTS[variant])], ("recorded", 7, "kill")).wait() == -signal.SIGKILL
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000005"]
    assert not (run / "model").exists()
    resumed = start(["resume", str(run)])
    assert resumed.wait() == 0
    assert "resuming after step 5" in resumed.output
    assert product(run) == product(whole[variant])
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(21))


@pytest.mark.long
@pytest.mark.parametrize("variant", ["ahead", "ahead by 1"])
@pytest.mark.row("R-03", "SIGKILL while the background samples, scores and is stored")
def test_killed_at_every_moment_of_the_background_a_run_resumes_to_the_same_bits(
    variant: str, whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", *flags(run, **VARIANTS[variant])]
    moments = [
        ("sample", 6),
        ("reward", 8),
        ("train", 8),
        ("filled", 10),
        ("committed", 10),
        ("eval", 15),
        ("sync", 13),
    ]
    for moment in moments:
        assert start(words, (*moment, "kill")).wait() == -signal.SIGKILL, moment
        words = ["resume", str(run)]
    assert start(words).wait() == 0
    assert product(run) == product(whole[variant])


@pytest.mark.long
@pytest.mark.row("R-03", "SIGKILL and SIGTERM of a run that streams")
def test_a_streamed_run_that_is_killed_and_stopped_goes_on_and_takes_every_step_once(
    start: Start, flags: Flags, tmp_path: Path
) -> None:
    """Which groups a step gets depends on the clock: the run is whole, its bits are its own."""
    run = tmp_path / "run"
    words = ["train", *flags(run, max_staleness=2, streaming=True, dynamic_sampling=2, eval_every=5)]
    moments = [("sample", 6, "kill"), ("reward", 8, "term"), ("filled", 10, "kill"), ("sync", 12, "kill")]
    for moment in moments:
        code = {"kill": -signal.SIGKILL, "term": 75}[moment[2]]
        ended = start(words, moment)
        assert ended.wait() == code, (moment, ended.output)
        words = ["resume", str(run)]
    assert start(words).wait() == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(21))
    assert max(row["rollout/staleness"] for row in rows[1:]) <= 2
    assert not (run / "lock").exists()


@pytest.mark.row("R-03", "SIGKILL at fixed delays")
def test_killed_at_arbitrary_moments_a_run_always_resumes_to_the_same_bits(
    whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    """A life may end while loading, sampling, rewarding, training, evaluating or saving: the moments are fixed, what is
    hit is not."""
    run = tmp_path / "run"
    process = start(["train", *flags(run, save_every=1)])
    process.wait_until((run / "checkpoints" / "step-000001").exists)
    process.kill()
    process.wait()
    for delay in (0.05, 0.4, 0.75, 1.0, 1.3):
        process = start(["resume", str(run)])
        time.sleep(delay)
        process.kill()
        process.wait()
    assert start(["resume", str(run)]).wait() == 0
    assert product(run) == product(whole["full"])
    counted = sorted(p.name for p in (run / "checkpoints").glob("step-*"))
    assert counted == ["step-000019", "step-000020"]


@pytest.mark.parametrize("fault", ["term", "int"])
@pytest.mark.row("R-11", "SIGTERM and SIGINT after a step")
def test_a_signal_saves_and_exits_75_and_the_run_resumes_to_the_same_bits(
    fault: str, whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = start(["train", *flags(run)], ("recorded", 8, fault))
    assert stopped.wait() == 75
    assert f"stopped after step 8 and saved; go on with: gruppo resume {run}" in stopped.output
    assert "Traceback" not in stopped.output
    assert json.loads((run / "status.json").read_text()) == {"status": "stopped", "step": 8}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000005", "step-000008"]
    assert not (run / "lock").exists()
    assert start(["resume", str(run)]).wait() == 0
    assert product(run) == product(whole["full"])


@pytest.mark.row("R-11", "SIGTERM twice")
def test_a_second_signal_leaves_at_once(start: Start, flags: Flags, tmp_path: Path) -> None:
    twice = [("recorded", 3, "term")] * 2
    assert start(["train", *flags(tmp_path / "run")], *twice).wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("first", ["int", "term"])
@pytest.mark.row("R-11", "SIGINT after SIGINT and after SIGTERM")
def test_ctrl_c_after_another_signal_leaves_at_once(first: str, start: Start, flags: Flags, tmp_path: Path) -> None:
    twice = [("recorded", 3, first), ("recorded", 3, "int")]
    assert start(["train", *flags(tmp_path / "run")], *twice).wait(30) == 128 + signal.SIGINT


@pytest.mark.row("R-04", "SIGKILL before the rename")
def test_dying_while_a_checkpoint_appears_leaves_the_one_before(
    whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert start(["train", *flags(run)], ("filled", 10, "kill")).wait() == -signal.SIGKILL
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-000005"]
    assert len(list((run / "checkpoints").glob(".step-000010.tmp-*"))) == 1  # written, complete, and not counted
    assert start(["resume", str(run)]).wait() == 0
    assert product(run) == product(whole["full"])


# --- damaged checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    """A run that stopped at step 12, with checkpoints of 10 and 5 (and no longer of 12)."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    trainer = GRPOTrainer(
        TrainConfig(**short_run(run)), quiet=True, callbacks=[lambda trainer, step, metrics: _raise_at(step, 12)]
    )
    with pytest.raises(Killed):
        trainer.train()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000005", "step-000010"]
    return run


class Killed(BaseException):
    """A process that ends where it is: no Exception, after which a run saves what it has learned."""


def _raise_at(step: int, at: int) -> None:
    if step == at:
        raise Killed


def damage(checkpoint: Path, how: str) -> None:
    weights = checkpoint / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    if how == "flip a bit":
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif how == "truncate":
        weights.write_bytes(data[:-100])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "remove the manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "damage the manifest":
        (checkpoint / "manifest.json").write_text('{"files": [')
    elif how == "remove a file":
        (checkpoint / "optimizer.safetensors").unlink()


HOW = ["flip a bit", "truncate", "empty", "remove the manifest", "damage the manifest", "remove a file"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.row("R-05", "bits flipped, files cut, emptied and removed")
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    how: str, stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    damage(run / "checkpoints" / "step-000010", how)
    trainer = GRPOTrainer(TrainConfig.of_run(run), resume=True, quiet=True)
    trainer.close()
    assert trainer.step_number == 5
    (warning,) = [r.getMessage() for r in caplog.records if "skipping a checkpoint" in r.getMessage()]
    assert "step-000010" in warning


@pytest.mark.row("R-05", "a bit flipped")
def test_a_run_resumed_past_a_damaged_checkpoint_ends_in_the_same_bits(
    stopped: Path, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    damage(run / "checkpoints" / "step-000010", "flip a bit")
    assert exit_code(["resume", str(run)]) == 0
    assert "resuming after step 5" in capsys.readouterr().out
    assert product(run) == product(whole["full"])


@pytest.mark.row("R-44", "pickles beside a checkpoint")
def test_pickles_in_a_checkpoint_are_not_opened(stopped: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "canary",))

    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for name in ("rng_state.pth", "optimizer.pt", "pytorch_model.bin", ".metadata", "trainer.pkl", "state.npy"):
        (run / "checkpoints" / "step-000010" / name).write_bytes(pickle.dumps(Payload()))
    trainer = GRPOTrainer(TrainConfig.of_run(run), resume=True, quiet=True)
    trainer.close()
    assert trainer.step_number == 10
    assert not (tmp_path / "canary").exists()


def exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("how", ["flip a bit", "remove the manifest"])
@pytest.mark.row("R-06", "all checkpoints damaged")
def test_with_no_whole_checkpoint_resume_exits_6_and_changes_nothing(
    how: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for checkpoint in (run / "checkpoints").iterdir():
        damage(checkpoint, how)
    before = tree_hash(run)
    assert exit_code(["resume", str(run)]) == 6
    assert "none of the 2 checkpoints" in capsys.readouterr().err
    assert tree_hash(run) == before


@pytest.mark.parametrize("verb", ["resume", "train"])
@pytest.mark.row("R-06", "SIGKILL before the first checkpoint")
def test_a_run_killed_before_its_first_checkpoint_starts_over_under_its_name(
    verb: str, whole: dict[str, Path], start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert start(["train", *flags(run)], ("recorded", 3, "kill")).wait() == -signal.SIGKILL
    assert not (run / "checkpoints").exists() and (run / "lock").exists()
    again = start(["resume", str(run)] if verb == "resume" else ["train", *flags(run)])
    assert again.wait() == 0, again.output
    assert "it starts over" in again.output
    assert product(run) == product(whole["full"])


def test_a_run_whose_reward_failed_at_its_first_step_can_be_started_again(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_late_reward.py").write_text(
        "def score(completions, **columns):\n"
        "    if set(completions) - {'', '0'}: raise RuntimeError('not yet')\n"
        "    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    words = ["train", *flags(tmp_path / "run", steps=2, eval_prompts=0)]
    assert exit_code([*words, "--rewards", "my_late_reward:score"]) == 4
    assert "my_late_reward" in capsys.readouterr().err
    assert exit_code([*words, "--rewards", "number_match"]) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"status": "done", "step": 2}


@pytest.mark.row("R-06", "all checkpoints deleted")
def test_a_run_whose_checkpoints_were_deleted_keeps_its_model(
    whole: dict[str, Path], flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["full"], run)
    shutil.rmtree(run / "checkpoints")
    before = tree_hash(run)
    assert exit_code(["resume", str(run), "--steps", "30"]) == 2
    assert f"has a model and no checkpoint to go on from; train on from the model with --model {run}/model" in (
        capsys.readouterr().err
    )
    assert exit_code(["train", *flags(run)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert tree_hash(run) == before


def test_a_last_step_behind_the_run_is_refused_and_changes_nothing(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    before = tree_hash(run)
    assert exit_code(["resume", str(run), "--steps", "3"]) == 2
    assert "steps=3 is behind the run, which is at step" in capsys.readouterr().err
    assert tree_hash(run) == before


def test_a_full_disk_at_a_checkpoint_exits_6_and_keeps_the_one_before(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    checkpoints = {p.name: tree_hash(p) for p in (run / "checkpoints").iterdir()}
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if ".step-000015" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert exit_code(["resume", str(run)]) == 6
    message = capsys.readouterr().err
    assert "could not write" in message and "No space left on device" in message and "MiB free" in message
    assert f"the steps after 10 are lost; then go on from it: gruppo resume {run}" in message
    assert {p.name: tree_hash(p) for p in (run / "checkpoints").iterdir()} == checkpoints
    assert json.loads((run / "status.json").read_text())["status"] == "failed"


# --- two processes ------------------------------------------------------------------------------------------------


@pytest.mark.row("R-55", "a second process, then SIGKILL of the first")
def test_a_second_process_is_refused_and_a_dead_ones_lock_is_taken_over(
    start: Start,
    flags: Flags,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 0.1)
    run = tmp_path / "run"
    first = start(["train", *flags(run, steps=5000, save_every=1, eval_prompts=0, completions_every=0)])
    first.wait_until((run / "checkpoints" / "step-000002").exists)
    assert exit_code(["resume", str(run)]) == 2
    assert f"is in use by process {first.process.pid}" in capsys.readouterr().err
    assert exit_code(["train", *flags(run)]) == 2
    assert f"is in use by process {first.process.pid}" in capsys.readouterr().err
    assert first.process.is_alive()
    first.kill()
    first.wait()
    assert (run / "lock").exists()
    newest = max(int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*"))
    assert exit_code(["resume", str(run), "--steps", str(newest + 1)]) == 0
    assert not (run / "lock").exists()


@pytest.mark.row("R-55", "a copy of a run that goes on")
def test_a_copy_of_a_run_in_use_is_not_in_use(
    start: Start, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 0.1)
    run, copy = tmp_path / "run", tmp_path / "copy"
    first = start(["train", *flags(run, steps=5000, save_every=1, eval_prompts=0, completions_every=0)])
    first.wait_until((run / "checkpoints" / "step-000002").exists)
    first.send(signal.SIGSTOP)
    shutil.copytree(run, copy)
    newest = max(int(p.name.removeprefix("step-")) for p in (copy / "checkpoints").glob("step-*"))
    held = (run / "lock").read_text()
    assert RunReader(copy).status()["status"] == "killed" and RunReader(run).status()["status"] == "running"
    assert exit_code(["resume", str(copy), "--steps", str(newest + 1)]) == 0
    assert not (copy / "lock").exists() and (run / "lock").read_text() == held
    assert exit_code(["resume", str(run)]) == 2
    first.kill()
