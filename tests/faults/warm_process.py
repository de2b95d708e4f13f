"""`gruppo ...` in processes of their own, which can be killed for real.

They are forked by a server that has imported torch and transformers already: a test pays for its run and not for
seven seconds of imports.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("pytest", "peft", "transformers", "transformers.models.qwen3.modeling_qwen3", "pyarrow.parquet"),
        *("gruppo.cli.train", "gruppo.model.checkpoint", "gruppo.trainer.trainer", "gruppo.run.checkpoints"),
    ]
)


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
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    target(*args)


def gruppo(arguments: Sequence[str], fault: str = "", step: int = 0) -> None:
    """The command line, with a fault planted at a step."""
    if fault:
        _plant(fault, step)
    from gruppo.cli.main import main

    main(list(arguments))


def _plant(fault: str, step: int) -> None:
    """`kill`, `term`, `int`: the signal, once metrics.jsonl has the step. `term twice`: and again while it saves.
    `exit in rename`: leave without a word when the checkpoint of the step is about to appear."""
    from gruppo.run.directory import RunDirectory

    def myself(number: int) -> None:
        os.kill(os.getpid(), number)

    if fault == "exit in rename":
        rename = os.rename

        def dying(source: Any, target: Any) -> None:
            if Path(target).name == f"step-{step:06d}":
                os._exit(9)
            rename(source, target)

        os.rename = dying
        return
    log = RunDirectory.log_metrics
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "term twice": signal.SIGTERM, "int": signal.SIGINT}[fault]

    def log_and_fall(self: RunDirectory, at: int, metrics: Any) -> None:
        log(self, at, metrics)
        if at == step:
            myself(number)
            if fault == "term twice":
                myself(number)
                time.sleep(60)

    RunDirectory.log_metrics = log_and_fall
