"""Runs on a Ray cluster of this machine: what is killed is started again, and the run goes on from where it was."""

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
from processes import steps_in
from test_ranks import assert_same_run, finish, metrics, start, train_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray; `make test-ray` installs it"),
]

STEPS = 12
HAS_VLLM = getattr(find_spec("vllm"), "origin", None) is not None
"""A folder of tests has that name too, and no origin."""


def command(run: Path, *flags: str, **options: Any) -> list[str]:
    usual = {"steps": STEPS, "prompts_per_step": 32, "eval_prompts": 32, "keep_checkpoints": 99, "completions_every": 0}
    return [*train_command(run, **usual | options), *flags]


class Driver:
    """A command on Ray as a child process, with its output in a file."""

    def __init__(self, folder: Path, words: list[str], **variables: str) -> None:
        self.log = folder / "driver.log"
        # A cluster of another test, or of the user, is not this one's.
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_TMPDIR": "/tmp"} | variables
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

    def wait_for(self, what: str, is_so: Callable[[], Any], seconds: float = 400) -> Any:
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
def driver(folder: Path, words: list[str], **variables: str) -> Iterator[Driver]:
    made = Driver(folder, words, **variables)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.terminate()
            made.process.wait(60)


def of_ray(kind: str, parent: int) -> list[psutil.Process]:
    """Workers of a cluster that are actors of a class, by the title that Ray gives them."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with_title = [] if not process.is_running() else _words(process)
        if with_title and with_title[0].startswith(f"ray::{kind}"):
            found.append(process)
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def rank(run: Path, is_first: bool, parent: int | None = None) -> psutil.Process | None:
    """The worker of the first rank, which owns the run, or of another one."""
    try:
        owner = json.loads((run / "lock").read_text())["pid"]
    except (OSError, ValueError):
        return None
    ranks = of_ray("RayTrainWorker", parent or os.getpid())
    return next((found for found in ranks if (found.pid == owner) == is_first), None)


def vllm_servers() -> list[psutil.Process]:
    """The guards of vLLM servers that actors have started; each leads the group of its server."""
    keepers = of_ray("ServerKeeper", os.getpid())
    children = [child for keeper in keepers for child in keeper.children()]
    return [child for child in children if any(word.endswith("vllm/guard.py") for word in _words(child))]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ray") / "one"
    assert finish(start(command(run), 1))[0][0] == 0
    return run


@pytest.mark.row("R-40", "SIGKILL of both ranks of a run on Ray, one after the other")
def test_a_rank_that_is_killed_is_started_again(tmp_path: Path, one_process: Path) -> None:
    run = tmp_path / "run"
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2")) as made:
        for number, is_first in enumerate((False, True), start=1):
            done = steps_in(run)
            made.wait_for("further steps", lambda done=done: steps_in(run) > done + 2)
            victim = rank(run, is_first)
            assert victim is not None
            victim.kill()
            made.wait_for("the loss", lambda number=number: f"(restart {number} of 3)" in made.output, 60)
        assert made.wait() == 0, made.output[-3000:]
    assert "ray: rank 1 is lost; all ranks start again (restart 1 of 3)" in made.output
    assert made.output.count("resuming after step") == 2
    assert_same_run(one_process, run)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.row("R-11", "SIGINT to the command of a run on Ray")
def test_a_signal_to_the_command_saves_and_the_run_goes_on_on_ray(tmp_path: Path, one_process: Path) -> None:
    run = tmp_path / "run"
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2", save_every=50)) as made:
        made.wait_for("two steps", lambda: steps_in(run) > 2)
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
        made.wait_for("a step", lambda: steps_in(run) > 1)
        victim = rank(run, is_first=False)
        assert victim is not None
        victim.kill()
        assert made.wait(90) == 7, made.output[-3000:]
    assert f"--max-restarts 0 is used up; look for the cause, then go on with: gruppo resume {run}" in made.output
    with driver(tmp_path, command(run, "--ray", "auto", "--ranks", "2", "--quantize", "nf4", "--lora")) as made:
        assert made.wait(120) == 2, made.output[-3000:]
    assert "on several ranks leave it out" in made.output and "restart 1" not in made.output


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with places for two actors on each of two nodes beside its head."""
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    usual = {"object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | usual)
    try:
        for _ in range(2):
            made.add_node(num_cpus=2, **usual)
        yield made
    finally:
        made.shutdown()


@pytest.mark.filterwarnings("default")  # of Ray, which is imported here
@pytest.mark.timeout(1500)  # a server starts four times, each within a minute or two
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM; `make test-ray` installs it")
@pytest.mark.row("R-36", "SIGKILL of a vLLM server on Ray, and of its node")
@pytest.mark.row("R-39", "the end of a run on Ray: its vLLM servers end too")
@pytest.mark.row("R-40", "SIGKILL of a rank on Ray, and of its node")
def test_a_run_outlives_a_server_a_rank_and_a_node(tmp_path: Path, cluster: Any) -> None:
    run = tmp_path / "run"
    flags = ["--ray", cluster.address, "--ranks", "2", "--samplers", "2", "--sampler", "vllm:start"]
    with driver(tmp_path, command(run, *flags, steps=100_000, prompts_per_step=8, eval_every=0)) as made:
        made.wait_for("three steps", lambda: steps_in(run) > 3)
        guards = vllm_servers()
        assert len(guards) == 2
        times = []

        def lose(what: str, kill: Callable[[], Any], line: str) -> None:
            done, said, started = steps_in(run), made.output.count(line), time.monotonic()
            kill()
            made.wait_for(line, lambda: made.output.count(line) > said)
            noticed = time.monotonic() - started
            made.wait_for(f"the run after {what}", lambda: steps_in(run) > done + 2)
            times.append(f"{what}: said after {noticed:.1f} s, steps again after {time.monotonic() - started:.1f} s")

        lose("server", lambda: os.killpg(guards[0].pid, signal.SIGKILL), "bringing it back, try 1 of 3")
        victim = rank(run, is_first=False)
        assert victim is not None and len(vllm_servers()) == 2
        lose("rank", victim.kill, "(restart 1 of 3)")
        assert guards[1] in vllm_servers(), "a server ends with a rank"

        def lose_node() -> None:
            lost = next(node for node in cluster.worker_nodes if held(node, "ServerKeeper") and held(node, "RayTrain"))
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)

        lose("node", lose_node, "(restart 2 of 3)")
        left = [process for guard in vllm_servers() for process in (guard, *guard.children(recursive=True))]
        assert len(left) >= 6  # of each server a guard, the server and an engine
        made.process.send_signal(signal.SIGINT)
        assert made.wait(120) == 75, made.output[-3000:]
        assert not psutil.wait_procs(left, timeout=60)[1], "a vLLM server outlived the run"
    print("\n".join(times))
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row["sync/canary_gap"] for row in rows[1:]) < 1e-4
    assert max(row["sampler/logp_gap_max"] for row in rows[1:]) < 1e-4


def held(node: Any, kind: str) -> list[psutil.Process]:
    """Actors of a class on a node."""
    (raylet,) = [each.process.pid for each in node.all_processes["raylet"]]
    return of_ray(kind, raylet)


@pytest.mark.filterwarnings("default")
def test_a_cluster_that_stays_too_small_is_an_error_that_names_what_is_missing(tmp_path: Path, cluster: Any) -> None:
    flags = ["--ray", cluster.address, "--ranks", "5"]
    with driver(tmp_path, command(tmp_path / "run", *flags), RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="1") as made:
        assert made.wait(120) == 2, made.output[-3000:]
    assert "5 ranks and 0 servers take a CPU each" in made.output and "the cluster has {'CPU': 4.0}" in made.output
    assert not (tmp_path / "run").exists()
