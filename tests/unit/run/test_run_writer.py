"""CompletionsWriter: a real process writes the files; whatever happens to it, each step has its file."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_running, wait_until

from gruppo.run import writer as module
from gruppo.run.completions import StepRecord, record_of
from gruppo.run.directory import RunDirectory
from gruppo.run.writer import CompletionsWriter
from gruppo.types import Group, Prompt, Rollout, Trajectory


def group(**changes: Any) -> Group:
    prompt = Prompt(token_ids=(1, 5), text="1+6=", columns=changes.pop("columns", {"answer": "7"}), index=4)
    trajectory = Trajectory(prompt=prompt, tokens=(8, 2), logps=(-0.1, -0.25), text="seven")
    return Group(prompt=prompt, rollouts=(Rollout(trajectory=trajectory, advantage=0.5, **changes),))


def record(step: int, **changes: Any) -> StepRecord:
    return record_of(step, [group(**changes)])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def writer(run: RunDirectory) -> Iterator[CompletionsWriter]:
    made = CompletionsWriter(run)
    yield made
    made.close()


def put(writer: CompletionsWriter, each: StepRecord) -> None:
    writer.problem = ""
    writer.write(each)
    writer.finish()


def pid(writer: CompletionsWriter) -> int:
    assert writer._process is not None
    return writer._process.pid


def files() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name))


def is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_the_file_is_that_which_the_trainer_would_write(
    writer: CompletionsWriter, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RunDirectory(tmp_path / "here")
    here.path.mkdir()
    here.put_record(record(3))
    monkeypatch.setattr(RunDirectory, "put_record", lambda *_: pytest.fail("written in this process"))
    put(writer, record(3))
    assert run.completions_file(3).read_bytes() == here.completions_file(3).read_bytes()
    assert (writer.problem, run.dropped) == ("", 0)


def test_a_process_that_is_killed_costs_no_step_and_is_started_again(
    writer: CompletionsWriter, run: RunDirectory
) -> None:
    problems, pids = [], []
    for step in range(1, 5):
        put(writer, record(step))
        problems.append(writer.problem)
        if step == 1:
            pids.append(pid(writer))
            os.kill(pid(writer), signal.SIGKILL)
            wait_until(lambda: not is_running(pids[0]), seconds=10.0)
    assert problems == ["", "the process that writes completions was killed by SIGKILL", "", ""]
    assert pid(writer) != pids[0] and is_running(pid(writer))
    assert run.completion_steps() == [1, 2, 3, 4]
    assert [run.completions(step)["completion"].to_pylist() for step in (1, 2, 3, 4)] == [["seven"]] * 4


def test_a_process_that_hangs_is_given_up(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 2)
    writer = CompletionsWriter(run)
    writer.write(record(1))
    wait_until(run.completions_file(1).exists, seconds=60.0)  # its imports alone may take longer than 2 s
    writer.finish()
    hung = pid(writer)
    os.kill(hung, signal.SIGSTOP)
    put(writer, record(2))
    assert writer.problem == "the process that writes completions did not answer within 2 s"
    assert run.completion_steps() == [1, 2] and not is_running(hung)
    writer.close()


def test_after_some_processes_the_trainer_writes_by_itself(writer: CompletionsWriter, run: RunDirectory) -> None:
    started = set()
    for step in range(1, 2 * module.MOST_STARTS + 3):
        put(writer, record(step))
        if writer._process is not None:
            started.add(pid(writer))
            writer._process.kill()
            writer._process.wait()
    assert len(started) == module.MOST_STARTS
    assert writer.problem == f"the process that writes completions was lost {module.MOST_STARTS} times"
    assert run.completion_steps() == list(range(1, 2 * module.MOST_STARTS + 3))


def test_where_no_process_can_be_started_the_trainer_writes(
    writer: CompletionsWriter, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = files()
    put(writer, record(1))
    assert "cannot be started: [Errno 2]" in writer.problem
    assert run.completion_steps() == [1] and files() == before


def test_a_signal_in_the_middle_of_a_record_costs_no_step(
    writer: CompletionsWriter, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    writer.write(record(1))
    broken = record(2)
    broken.rewards["x"] = [Interrupts()]  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyboardInterrupt):
        writer.write(broken)
    broken.rewards.clear()
    writer.write(record(3))
    writer.finish()
    assert run.completion_steps() == [1, 2, 3]


def test_values_that_only_this_process_has_are_written_as_text(writer: CompletionsWriter, run: RunDirectory) -> None:
    class Local:
        def __str__(self) -> str:
            return "mine"

    put(writer, record(1, columns={"answer": Local()}, extras={"x": Local(), "y": [1, 2]}))
    assert writer.problem == ""
    (row,) = run.completions(1).to_pylist()
    assert (row["columns"], row["extra/x"], row["extra/y"]) == ('{"answer": "mine"}', '"mine"', [1, 2])


def test_a_record_that_cannot_be_sent_is_written_here_and_the_process_goes_on(
    writer: CompletionsWriter, run: RunDirectory
) -> None:
    class Local(float):
        pass

    put(writer, record(1))
    first = pid(writer)
    put(writer, record(2, reward=Local(0.25)))
    assert "cannot be sent" in writer.problem
    put(writer, record(3))
    assert writer.problem == "" and pid(writer) == first
    assert [run.completions(step)["reward"].to_pylist() for step in (1, 2, 3)] == [[None], [0.25], [None]]


def test_a_disk_that_is_full_is_counted_once_and_named(
    writer: CompletionsWriter, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        writer.start()  # it inherits the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for step in (1, 2):
        put(writer, record(step))
    assert (run.dropped, writer.problem, list((run.path / "completions").iterdir())) == (2, "", [])
    assert [line.getMessage() for line in caplog.records] == [
        "step-000001.parquet cannot be written ([Errno 27] File too large); the run goes on without such records"
    ]


def test_signals_to_the_whole_job_do_not_end_it(writer: CompletionsWriter, run: RunDirectory) -> None:
    put(writer, record(1))
    first = pid(writer)
    assert os.getsid(first) == first != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(first, number)
    put(writer, record(2))
    assert writer.problem == "" and pid(writer) == first


def test_nothing_is_left_after_close(writer: CompletionsWriter, run: RunDirectory) -> None:
    before = files()
    put(writer, record(1))
    number = pid(writer)
    writer.close()
    assert not is_running(number) and files() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(number, os.WNOHANG)  # no zombie either
    assert [path.name for path in (run.path / "completions").iterdir()] == ["step-000001.parquet"]


def test_it_loads_neither_torch_nor_the_trainer() -> None:
    code = "import sys, gruppo.run.writer; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"numpy", "pyarrow"} <= set(loaded) and not {"torch", "transformers", "pandas"} & set(loaded)


KILLED = """
import sys, time
from pathlib import Path
from gruppo.run.completions import record_of
from gruppo.run.directory import RunDirectory
from gruppo.run.writer import CompletionsWriter
writer = CompletionsWriter(RunDirectory(sys.argv[1]))
writer.write(record_of(1, []))
writer.finish()
print(writer._process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_at_once_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        number = int(trainer.stdout.readline())
        assert is_running(number)
        trainer.kill()
    wait_until(lambda: not is_running(number), seconds=1.0)
