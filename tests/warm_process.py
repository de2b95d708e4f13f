"""`gruppo ...` and other Python in processes of their own, which can be killed for real.

They are forked by a server that has imported torch and transformers already: a test pays for its run and not for
seven seconds of imports. `run_python` and `Command` stand for `subprocess.run` and `subprocess.Popen`. Those are still
needed where a test is about imports, about how Python starts or ends, or about a variable that a package reads when it
is imported (`HF_...`, `GRUPPO_FAULTS`, `OMP_NUM_THREADS`).
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("pytest", "peft", "transformers", "transformers.models.qwen3.modeling_qwen3", "pandas"),
        *("pyarrow.parquet", "pyarrow.dataset", "gruppo.cli.main", "gruppo.cli.train", "gruppo.model.checkpoint"),
        *("gruppo.trainer.trainer", "gruppo.recipes", "gruppo.run.checkpoints", "gruppo.run.completions"),
    ]
)
# The path of the server's socket may have 107 characters, 33 of them its own.
if len(tempfile.gettempdir()) > 70 and multiprocessing.parent_process() is None:
    _FOLDER = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    multiprocessing.current_process()._config["tempdir"] = _FOLDER  # pyright: ignore[reportAttributeAccessIssue]
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


class Command(subprocess.Popen):
    """`python WORDS` (-m MODULE, -c CODE or a script), with the options of Popen that tests use."""

    def __init__(self, words: Sequence[str | Path], **options: Any) -> None:
        super().__init__([sys.executable, *map(str, words)], **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *options: Any) -> None:
        _, cwd, env, _, _, _, *pipes = options[:12]
        stdio = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        # A connection is what multiprocessing hands on, and it closes what it was made of.
        handed = [Connection(os.dup(descriptor)) for descriptor in stdio]
        folder = str(cwd or Path.cwd())
        self._process = _CONTEXT.Process(target=_as_python, args=(args[1:], folder, dict(env or os.environ), handed))
        self._process.start()
        self._child_created = True
        self.pid = self._process.pid
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def run_python(
    words: Sequence[str | Path], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`python WORDS` to its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with Command(words, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _as_python(words: list[str], folder: str, environment: Mapping[str, str], stdio: Sequence[Connection]) -> None:
    _begin()
    for number, connection in enumerate(stdio):
        os.dup2(connection.fileno(), number)
        connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, errors=errors or "strict", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    first, *rest = words
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    start = folder if first == "-m" else "" if first == "-c" else str(Path(first).resolve().parent)
    sys.path[:] = [start, *given, *(place for place in sys.path if not Path(place).is_relative_to(TESTS))]
    sys.argv = rest if first == "-m" else ["-c", *rest[1:]] if first == "-c" else words
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def _begin() -> None:
    """Signals are as in a terminal, also where the tests run under nohup or in the background of a shell."""
    gc.freeze()  # looking through what was imported before the fork would copy it, a quarter of the time of a short run
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class WarmProcess:
    """One process; `output` is what it printed."""

    def __init__(self, log: Path, target: Callable[..., None], *args: Any) -> None:
        self.log = log
        self.process = _CONTEXT.Process(target=_redirected, args=(str(log), target, args))
        self.process.start()

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit code, as a shell would say it for signals: -9 for SIGKILL."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s:\n{self.output}"
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL; nothing happens if it has ended by itself (its number may be another process's by now)."""
        self.process.kill()

    def send(self, number: int) -> None:
        """A signal, if the process has not ended."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def wait_until(self, is_true: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait for something the process does; it must not end before."""
        end = time.monotonic() + seconds
        while not is_true():
            assert self.process.is_alive(), f"ended with {self.process.exitcode}:\n{self.output}"
            assert time.monotonic() < end, f"waited {seconds} s:\n{self.output}"
            time.sleep(0.005)

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()


def _redirected(log: str, target: Callable[..., None], args: Sequence[Any]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _begin()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    target(*args)


def gruppo(arguments: Sequence[str], *plan: tuple[str, int, str]) -> None:
    """The command line, with faults planned as (site, step, action)."""
    from gruppo import faults
    from gruppo.cli.main import main

    faults.PLAN = [faults.Fault(*fault) for fault in plan]
    main(list(arguments))


def on_small_disk(
    arguments: Sequence[str],
    disk: str,
    size: int,
    kept: str,
    *,
    fill_after: int = 0,
    read_only: bool = False,
    filled_from: str = "",
) -> None:
    """The command line with the folder `disk` on a file system of its own; a copy of it stays in `kept`.

    Args:
        size: bytes of the file system.
        fill_after: once a run on it has recorded this step, it is full until three records were dropped.
        read_only: nothing can be written to it; it holds a copy of `kept`.
        filled_from: a folder of which it holds a copy.
    """
    import threading

    from gruppo.cli.main import main

    mount(disk, f"size={size}")
    if read_only:
        shutil.copytree(kept, disk, dirs_exist_ok=True)
        mount(disk, f"size={size}", flags=MS_REMOUNT | MS_RDONLY)
    if filled_from:
        shutil.copytree(filled_from, disk, dirs_exist_ok=True)
    if fill_after:
        threading.Thread(target=_fill_for_a_while, args=(Path(disk), fill_after), daemon=True).start()
    try:
        main(list(arguments))
    finally:
        if not read_only:
            shutil.copytree(disk, kept)


def _fill_for_a_while(disk: Path, step: int) -> None:
    from gruppo.run.directory import RunDirectory

    (metrics,) = _wait_for(lambda: list(disk.glob("*/metrics.jsonl")))
    _wait_for(lambda: metrics.read_bytes().count(b"\n") > step)
    fill(disk)
    runs = [found for found in gc.get_objects() if isinstance(found, RunDirectory)]
    _wait_for(lambda: any(run.dropped >= 3 for run in runs))
    (disk / "filler").unlink()


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (2**16, 1):
            try:
                while True:
                    filler.write(b"\0" * size)
            except OSError:
                pass


def _wait_for(found: Callable[[], Any]) -> Any:
    while not (value := found()):
        time.sleep(0.001)
    return value


CLONE_NEWUSER, CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 0x10000000, 0x20000, 1, 32, 0x4000, 1 << 18


def mount(folder: str, options: str, flags: int = 0) -> None:
    """A tmpfs on a folder, for this process alone."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def call(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    if not flags:
        user, group = os.geteuid(), os.getegid()
        call(libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)))
        if user:  # without a map no file of that disk can have an owner
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    call(libc.mount(b"none", folder.encode(), b"tmpfs", flags, options.encode()))


def can_mount(folder: str) -> None:
    """Ends with 0 where this process may mount a file system of its own, and write to it."""
    mount(folder, "size=8192")
    (Path(folder) / "file").write_text("written")
