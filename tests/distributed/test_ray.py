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
import torch
from test_ranks import assert_same_run, finish, metrics, start, train_command, weights

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


def replica_processes() -> list[psutil.Process]:
    """The actors that sample, by the title that Ray gives its processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Replica"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_same_but_sync(one: Path, other: Path) -> None:
    """As `assert_same_run`; a run with samplers also reports what it handed over to them."""
    rows = [{n: x for n, x in row.items() if not n.startswith("sync/")} for row in metrics(other)]
    assert metrics(one) == rows
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert not [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with places for two actors on each of two nodes."""
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    usual = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=usual)
    try:
        made.add_node(num_cpus=2, object_store_memory=100 * 2**20)
        yield made
    finally:
        made.shutdown()


@pytest.mark.filterwarnings("default")  # of Ray, which is imported here
def test_a_run_outlives_a_sampler_a_rank_and_a_node(tmp_path: Path, cluster: Any) -> None:
    whole, run, num_steps = tmp_path / "whole", tmp_path / "run", 40
    assert finish(start(command(whole, steps=num_steps), 1))[0][0] == 0
    flags = ["--ray", cluster.address, "--ranks", "2", "--samplers", "2"]
    with driver(tmp_path, command(run, *flags, steps=num_steps)) as made:
        made.wait_for("three steps", lambda: steps(run) >= 3)

        def lose(what: str, kill: Callable[[], Any], line: str, is_back: Callable[[], Any]) -> None:
            done, started = steps(run), time.monotonic()
            kill()
            made.wait_for(line, lambda: line in made.output, 30)
            noticed = time.monotonic() - started
            made.wait_for(f"the run after {what}", lambda: steps(run) > done + 1)
            again = time.monotonic() - started
            made.wait_for(f"{what} back", is_back)
            print(f"{what}: said after {noticed:.1f} s, steps again after {again:.1f} s, ", end="")
            print(f"whole after {time.monotonic() - started:.1f} s")

        samplers = replica_processes()
        assert len(samplers) == 2
        is_back = lambda: len(replica_processes()) == 2  # noqa: E731
        lose("sampler", samplers[0].kill, "(restart 1 of 3)", is_back)
        lose("rank", lambda: rank_process(run, 1).kill(), "(restart 2 of 3)", is_back)  # type: ignore[union-attr]
        second = cluster.list_all_nodes()[1]
        lost = time.monotonic()

        def lose_node() -> None:
            cluster.remove_node(second, allow_graceful=False)
            made.wait_for("the cluster is too small", lambda: "has 2 of 4 CPUs" in made.output, 60)
            print(f"the cluster is too small: said after {time.monotonic() - lost:.1f} s")
            cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)

        lose("node", lose_node, "(restart 3 of 3)", is_back)
        assert made.wait() == 0, made.output[-3000:]
    said = [line for line in made.output.splitlines() if line.startswith("ray: ")]
    print("\n".join(said))
    assert "is lost" in said[0] and said[0].startswith("ray: sampler ")
    assert said[1].startswith("ray: rank 1 is lost (killed by signal 9")
    assert said[2].startswith("ray: the node ") and "; all ranks start again after step " in said[2]
    assert_same_but_sync(whole, run)


def test_adapters_and_rollouts_ahead_come_from_samplers_too(tmp_path: Path) -> None:
    options = {"lora": "", "max_staleness": 1, "steps": 4, "save_every": 50}
    words = [word for word in command(tmp_path / "whole", **options) if word]
    assert finish(start(words, 1))[0][0] == 0
    for samplers in ("1", "3"):
        run = tmp_path / f"on-{samplers}"
        words = [word for word in command(run, "--ray", "auto", "--samplers", samplers, **options) if word]
        with driver(tmp_path, words) as made:
            assert made.wait() == 0, made.output[-3000:]
        assert_same_but_sync(tmp_path / "whole", run)


def test_a_sampler_that_hangs_is_ended_and_replaced(tmp_path: Path, one_process: Path) -> None:
    run = tmp_path / "run"
    words = command(run, "--ray", "auto", "--samplers", "1", sampler_deadline=15)
    with driver(tmp_path, words) as made:
        made.wait_for("two steps", lambda: steps(run) >= 2)
        (sampler,) = replica_processes()
        sampler.suspend()
        made.wait_for("the line", lambda: "ray: sampler 0 is lost" in made.output, 60)
        assert made.wait() == 0, made.output[-3000:]
    assert "the run waits for it until it is started again (restart 1 of 3)" in made.output
    assert_same_but_sync(one_process, run)


@pytest.mark.filterwarnings("default")
def test_a_cluster_that_stays_too_small_is_an_error_that_names_what_is_missing(cluster: Any) -> None:
    import ray

    from gruppo.cli.cluster import place
    from gruppo.cli.ray import RayOptions
    from gruppo.errors import InputError
    from gruppo.run.signals import StopFlag

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with pytest.raises(InputError, match=r"2 ranks and 3 samplers need .* 2 nodes has 4 of 5 CPUs"):
            place(RayOptions(ray="auto", ranks=2, samplers=3), {"CPU": 1.0}, StopFlag(), patience_s=2)
    finally:
        ray.shutdown()
