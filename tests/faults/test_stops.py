"""R-11 and R-51: signals at every site of a step, and Ctrl-C on a real terminal."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import steps_in, wait_until
from test_resume import product
from warm_process import WarmProcess, gruppo

from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    GRPOTrainer(TrainConfig(**short_run(run)), quiet=True).train()
    return run


@pytest.mark.parametrize("name", ["my run", "-dash", "a'b $HOME"])
def test_the_command_that_a_stopped_run_prints_can_be_pasted_into_a_shell(
    name: str, start: Start, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--output={name}" if word == "OUT" else word for word in flags(Path("OUT")) if word != "--output"]
    stopped = start(["train", *words], ("recorded", 2, "term"))
    assert stopped.wait(30) == 75, stopped.output
    command = stopped.output.partition("go on with: gruppo ")[2].partition("\n")[0]
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True).stdout
    verb, path = shown.splitlines()
    assert (verb, Path(path)) == ("resume", Path(name))
    assert start([verb, path]).wait() == 0


@pytest.mark.row("R-11", "SIGTERM at each site of a step")
@pytest.mark.parametrize(
    ("site", "taken", "saved"),
    [
        ("sample", 6, 6),
        ("reward", 6, 7),  # what was sampled and scored is trained on before the run stops
        pytest.param("train", 6, 7, marks=pytest.mark.long),
        pytest.param("write", 7, 7, marks=pytest.mark.long),
        ("eval", 10, 10),
        pytest.param("recorded", 7, 7, marks=pytest.mark.long),
        pytest.param("checkpoint", 10, 10, marks=pytest.mark.long),
        ("filled", 10, 10),
        pytest.param("committed", 10, 10, marks=pytest.mark.long),
    ],
)
def test_a_signal_at_any_site_saves_within_10_s_and_resumes_to_the_same_bits(
    site: str, taken: int, saved: int, start: Start, flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    stopped = start(["train", *flags(run)], (site, taken, "term"))
    wait_until(lambda: not stopped.process.is_alive() or steps_in(run) >= 5, seconds=120.0)  # loading has its time
    assert stopped.wait(30) == 75, stopped.output
    assert f"stopped after step {saved} and saved; go on with: gruppo resume {run}" in stopped.output
    assert json.loads((run / "status.json").read_text()) == {"status": "stopped", "step": saved}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "stop"
    assert start(["resume", str(run)]).wait() == 0
    assert product(run) == product(undisturbed)


@pytest.mark.row("R-11", "SIGHUP and SIGUSR1, as a lost terminal and a scheduler send them")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_the_signals_of_terminals_and_schedulers_save_too(
    number: int, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run, steps=5000, save_every=5000)])
    process.wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 2000)
    process.send(number)
    assert process.wait(30) == 75, process.output
    status = json.loads((run / "status.json").read_text())
    assert status["status"] == "stopped"
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{status['step']:06d}"]


@pytest.mark.row("R-11", "two signals, the second while the first is saved")
@pytest.mark.parametrize(
    ("first", "second"),
    [("hup", "hup"), ("usr1", "usr1"), ("usr1", "hup"), ("hup", "term"), ("usr1", "term")],
)
def test_a_second_signal_does_not_end_the_save_of_the_first(
    first: str, second: str, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stopped = start(["train", *flags(run, save_every=20)], ("recorded", 7, first), ("filled", 7, second))
    assert stopped.wait(30) == 75, stopped.output
    assert json.loads((run / "status.json").read_text()) == {"status": "stopped", "step": 7}
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000007"]
    assert not (run / "lock").exists()


@pytest.mark.row("R-11", "Ctrl-C twice, the second time while the first is saved")
@pytest.mark.parametrize(
    ("save_every", "saved"), [(3, "step 6 is saved"), (20, "no step is saved, and it starts over")]
)
@pytest.mark.parametrize(("second", "code"), [("int", 130), ("term", 143)])
def test_a_second_ctrl_c_says_what_is_saved(
    save_every: int, saved: str, second: str, code: int, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    left = start(["train", *flags(run, save_every=save_every)], ("recorded", 7, "int"), ("filled", 7, second))
    assert left.wait(30) == code, left.output
    assert left.output.splitlines()[-1] == f"left at once; {saved}: gruppo resume {run}"


@pytest.mark.row("R-11", "a signal while model/ is written at the end")
@pytest.mark.parametrize("action", ["hup", "usr1", "term", "int"])
def test_a_signal_while_the_model_is_written_leaves_a_run_that_is_done(
    action: str, start: Start, flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run)], ("filled", 0, action))
    assert process.wait(30) == 0, process.output
    assert json.loads((run / "status.json").read_text()) == {"status": "done", "step": 20}
    assert product(run) == product(undisturbed)


def signalled_at_start(arguments: list[str], number: int) -> None:
    """The command line with a signal once the model is loaded, before training begins."""
    from gruppo.trainer import build

    load = build.build_model

    def load_and_signal(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return load(*args)

    build.build_model = load_and_signal
    gruppo(arguments)


@pytest.mark.row("R-11", "a signal before training begins")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_start_leaves_nothing(number: int, flags: Flags, tmp_path: Path) -> None:
    process = WarmProcess(tmp_path / "log", signalled_at_start, ["train", *flags(tmp_path / "runs" / "run")], number)
    assert process.wait(60) == 128 + number, process.output
    process.close()
    assert not (tmp_path / "runs").exists()


def ignoring_hangup(arguments: list[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gruppo(arguments)


@pytest.mark.row("R-51", "a lost terminal under nohup")
def test_a_run_that_ignores_its_terminal_goes_on(flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = WarmProcess(tmp_path / "log", ignoring_hangup, ["train", *flags(run, steps=40)])
    process.wait_until(lambda: (run / "metrics.jsonl").exists())
    process.send(signal.SIGHUP)
    assert process.wait() == 0, process.output
    process.close()
    assert json.loads((run / "status.json").read_text()) == {"status": "done", "step": 40}


@pytest.mark.long
@pytest.mark.row("R-51", "Ctrl-C typed into a pseudo-terminal")
def test_ctrl_c_on_a_terminal_saves_without_a_traceback(flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background of a shell
        os.execvp(sys.executable, [sys.executable, "-m", "gruppo", "train", *flags(run, steps=5000)])
    shown, typed, end = b"", False, time.monotonic() + 100
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 0.1)[0]:
            pass
        else:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        if not typed and (run / "metrics.jsonl").exists():
            os.write(terminal, b"\x03")
            typed = True
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert code == 75, shown.decode(errors="replace")
    assert b"Traceback" not in shown and b"gruppo resume" in shown
    assert json.loads((run / "status.json").read_text())["status"] == "stopped"


@pytest.mark.long
@pytest.mark.row("R-01", "GRUPPO_FAULTS in a real process: SIGKILL after a step")
def test_a_plan_in_the_environment_reaches_a_real_process(flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = json.dumps([{"site": "recorded", "step": 3, "action": "kill"}])
    command = [sys.executable, "-m", "gruppo", "train", *flags(run)]
    done = subprocess.run(command, env=os.environ | {"GRUPPO_FAULTS": plan}, capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def leave_into_a_full_pipe() -> None:
    """A second Ctrl-C where standard error is a pipe that nobody reads and that takes no byte more."""
    from gruppo.run.signals import StopFlag

    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    os.dup2(writer, 2)
    with StopFlag().listening():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


@pytest.mark.row("R-11", "Ctrl-C twice with an output that nobody reads")
def test_leaving_at_once_waits_for_no_reader(tmp_path: Path) -> None:
    process = WarmProcess(tmp_path / "log", leave_into_a_full_pipe)
    assert process.wait(30) == 130
    process.close()


def signalled_while_it_tidies(arguments: list[str], tidied: str) -> None:
    """Ctrl-C once the model is being loaded, and again while what was made for it is taken back."""
    from gruppo.run import directory
    from gruppo.trainer import build

    close = directory.RunDirectory.__exit__

    def load(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("nobody heard the signal")

    def close_and_signal(run: Any, *args: Any) -> None:
        Path(tidied).touch()
        os.kill(os.getpid(), signal.SIGINT)
        close(run, *args)

    build.build_model = load
    directory.RunDirectory.__exit__ = close_and_signal  # type: ignore[assignment]
    gruppo(arguments)


@pytest.mark.row("R-11", "Ctrl-C twice before training begins")
def test_ctrl_c_before_training_begins_says_what_is_saved(start: Start, flags: Flags, tmp_path: Path) -> None:
    run, tidied = tmp_path / "run", tmp_path / "tidied"

    def left(words: list[str]) -> str:
        process = WarmProcess(
            tmp_path / f"log-{len(list(tmp_path.iterdir()))}", signalled_while_it_tidies, words, str(tidied)
        )
        assert process.wait(60) == 130, process.output
        process.close()
        assert tidied.exists() and "Traceback" not in process.output
        return process.output.splitlines()[-1]

    words = ["train", *flags(run, steps=4, save_every=2)]
    assert left(words) == "left before training began; nothing was saved"
    # What the second one left behind is no run: the same command starts.
    stopped = start(words, ("sample", 2, "term"))
    assert stopped.wait(60) == 75, stopped.output
    assert left(["resume", str(run)]) == f"left before training went on; step 2 is saved: gruppo resume {run}"
    on = start(["resume", str(run)])
    assert on.wait(60) == 0, on.output


@pytest.mark.row("R-11", "Ctrl-C twice in the evaluation before the first step")
@pytest.mark.parametrize("site", ["eval", "sample"])
def test_a_second_ctrl_c_before_the_first_step_says_that_nothing_is_saved(
    site: str, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    left = start(["train", *flags(run, steps=2)], (site, 0, "int"), ("filled", 0, "int"))
    assert left.wait(30) == 130, left.output
    assert left.output.splitlines()[-1] == f"left at once; no step is saved, and it starts over: gruppo resume {run}"
    on = start(["resume", str(run)])
    assert on.wait(60) == 0, on.output
    assert json.loads((run / "status.json").read_text()) == {"status": "done", "step": 2}


ENDING = """
import os, signal, sys
from gruppo.cli.main import main
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
last = Last()
main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.row("R-11", "Ctrl-C again while Python ends")
def test_ctrl_c_after_a_run_was_saved_leaves_its_exit_code(flags: Flags, tmp_path: Path) -> None:
    plan = json.dumps([{"site": "recorded", "step": 1, "action": "int"}])
    command = [sys.executable, "-c", ENDING, "train", *flags(tmp_path / "run")]
    done = subprocess.run(
        command, env=os.environ | {"GRUPPO_FAULTS": plan}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 75, done.stderr
    assert "stopped after step 1 and saved" in done.stdout and "Traceback" not in done.stderr
