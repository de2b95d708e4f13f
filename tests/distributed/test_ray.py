"""Runs on a real Ray cluster of this machine: ranks and samplers as actors, killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ranks import assert_same_run, finish, start, train_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'gruppo[ray]'"),
]

STEPS = 12


def command(run: Path, *flags: str, **options: Any) -> list[str]:
    usual = {"steps": STEPS, "prompts_per_step": 32, "eval_prompts": 32, "keep_checkpoints": 99}
    return [*train_command(run, **usual | options), *flags]


class Driver:
    """A command on Ray as a child process, with its output in a file."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.log = folder / "driver.log"
        # A cluster of another test, or of the user, is not this one's.
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": "/tmp"}
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 300) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the run does not end: {self.output[-3000:]}")

    def wait_for(self, what: str, is_so: Callable[[], Any], seconds: float = 180) -> Any:
        """The first true answer; fails when the run ends before, or takes too long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if found := is_so():
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        pytest.fail(f"waiting for {what}: {self.output[-3000:]}")


@contextmanager
def driver(folder: Path, words: list[str]) -> Iterator[Driver]:
    made = Driver(folder, words)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.terminate()
            made.process.wait(60)


def steps(run: Path) -> int:
    """Steps that a run has recorded."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def rank_process(run: Path, rank: int) -> psutil.Process | None:
    """The program of a rank."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "gruppo" in words and str(run) in words and process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    return None


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ray") / "one"
    assert finish(start(command(run), 1))[0][0] == 0
    return run


def test_a_rank_that_is_killed_is_started_again(tmp_path: Path, one_process: Path) -> None:
    run = tmp_path / "run"
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2")) as made:
        made.wait_for("three steps", lambda: steps(run) >= 3)
        victim = rank_process(run, 1)
        assert victim is not None
        actor = victim.parent()
        victim.kill()
        made.wait_for("the line of the loss", lambda: "ray: rank 1 is lost (killed by signal 9" in made.output, 10)
        assert "(restart 1 of 3)" in made.output
        # The actor of the first rank: its program must not outlive it.
        done = steps(run)
        made.wait_for("further steps", lambda: steps(run) > done)
        first = made.wait_for("the first rank", lambda: rank_process(run, 0))
        assert actor is not None and not actor.is_running()
        parent = first.parent()
        assert parent is not None
        parent.kill()
        assert psutil.wait_procs([first], timeout=10)[0], "the program of a rank outlived its actor"
        made.wait_for("the second line", lambda: "(restart 2 of 3)" in made.output, 20)
        assert made.wait() == 0, made.output[-3000:]
    assert "resuming after step" in made.output
    assert_same_run(one_process, run)


def test_a_signal_to_the_driver_saves_and_the_run_goes_on_on_ray(tmp_path: Path, one_process: Path) -> None:
    run = tmp_path / "run"
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2", save_every=50)) as made:
        made.wait_for("two steps", lambda: steps(run) >= 2)
        made.process.send_signal(signal.SIGINT)
        assert made.wait(90) == 75, made.output[-3000:]
    assert "and saved; go on with: gruppo resume" in made.output
    assert json.loads((run / "status.json").read_text())["status"] == "stopped"
    resume = [sys.executable, "-m", "gruppo", "resume", str(run), "--ray", "auto", "--ranks", "1"]
    with driver(tmp_path, resume) as made:
        assert made.wait() == 0, made.output[-3000:]
    assert_same_run(one_process, run)


def test_the_bound_ends_the_run_and_an_error_of_the_run_is_not_tried_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2", "--max-restarts", "0")) as made:
        made.wait_for("a step", lambda: steps(run) >= 1)
        rank_process(run, 1).kill()  # type: ignore[union-attr]
        assert made.wait(60) == 7, made.output[-3000:]
    assert f"--max-restarts 0 are used up; look for the cause, then go on with: gruppo resume {run}" in made.output
    assert rank_process(run, 0) is None
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2", "--quantize", "nf4", "--lora")) as made:
        assert made.wait(120) == 2, made.output[-3000:]
    assert "on several ranks leave it out" in made.output and "restart 1" not in made.output
