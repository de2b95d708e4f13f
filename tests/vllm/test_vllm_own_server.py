"""A server that the trainer started: it is restarted when it dies, and it ends when the trainer dies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import wait_until
from small_runs import options, update

from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler.vllm.engine import engine_arguments
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.trainer import GRPOTrainer
from gruppo.types import InputFeature
from gruppo.weights.source import resolve

LORA = {"lora": True, "lora_rank": 4}


class Command:
    """`gruppo train` in a process of its own."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, run.with_suffix(".log")
        self.seen: list[psutil.Process] = []
        words = []
        for name, value in options(run, sampler="vllm:start", **LORA, steps=100_000).items():
            flag = name.replace("_", "-")
            words += (
                [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gruppo", "train", *words], stdout=log, stderr=log, start_new_session=True
            )

    def server(self) -> list[psutil.Process]:
        """All processes of the server, its guard first."""
        children = psutil.Process(self.process.pid).children()
        guards = [c for c in children if any("vllm/guard.py" in word for word in c.cmdline())]
        self.seen += (found := [p for guard in guards for p in (guard, *guard.children(recursive=True))])
        return found

    def wait_for_step(self, step: int, seconds: float = 400.0) -> None:
        ends = time.monotonic() + seconds
        while not (self.run / "completions" / f"step-{step:06d}.parquet").exists():
            assert self.process.poll() is None and time.monotonic() < ends, self.log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in self.seen:
            with suppress(psutil.NoSuchProcess):  # as it should be
                process.kill()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path / "run")
    yield made
    made.close()


def is_running(process: psutil.Process) -> bool:
    """A zombie is not: it waits for a parent to take note."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_adapter_is_read_once(tmp_path: Path) -> None:
    lora = LoraSpec(rank=4)
    model = TransformersModel("builtin", device="cpu", lora=lora)
    arguments = engine_arguments(model=resolve("builtin"), dtype="float32", max_model_len=24, lora=lora)
    engine = HttpEngine((process := ServerProcess(arguments)).address, process=process)
    try:
        engine.wait_until_ready()
        for folder in (tmp_path / "first", tmp_path / "second"):
            update(model, 5)
            model.save(folder)
            engine.load_adapter(folder)
            shutil.rmtree(folder)
            rows = [tuple(range(1, 9)), tuple(range(3, 9))]
            features = [InputFeature(prompt_ids=row[:1], completion_ids=row[1:]) for row in rows]
            for own, served in zip(model.forward_only(features)["logps"], engine.logps_of(rows), strict=True):
                assert served == pytest.approx(own.tolist(), abs=1e-4)
    finally:
        engine.close()


@pytest.mark.row("R-36", "SIGKILL of a vllm serve of ours")
@pytest.mark.row("R-39", "SIGKILL of the trainer of a vllm serve")
def test_it_comes_back_when_it_is_killed_and_ends_when_the_trainer_is(
    command: Command, trainers: Callable[..., GRPOTrainer]
) -> None:
    inside = trainers(sampler="vllm", **LORA, steps=6)  # while the server starts
    inside.train()
    command.wait_for_step(3)
    first = command.server()
    os.killpg(first[0].pid, signal.SIGKILL)
    command.wait_for_step(6)
    assert not any(is_running(p) for p in first)
    second = command.server()
    assert len(second) == len(first) >= 4  # guard, server, engine, worker
    assert "bringing it back, try 1 of 3" in command.log.read_text()

    command.process.kill()
    command.process.wait()
    wait_until(lambda: not any(is_running(p) for p in second), seconds=30.0)

    # What was sampled is what would have been sampled: by the engine inside this process, which nobody disturbed.
    for step in range(1, 6):
        name = f"step-{step:06d}.parquet"
        assert (command.run / "completions" / name).read_bytes() == (
            inside.run.path / "completions" / name
        ).read_bytes()
