"""`gruppo ...` in processes of their own, which can be killed for real.

They are forked by a server that has imported torch and transformers already: a test pays for its run and not for
seven seconds of imports.
"""

import multiprocessing
import os
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


def gruppo(arguments: Sequence[str], *plan: tuple[str, int, str]) -> None:
    """The command line, with faults planned as (site, step, action)."""
    from gruppo import faults
    from gruppo.cli.main import main

    faults.PLAN = faults.FaultPlan(tuple(faults.Fault(*fault) for fault in plan))
    main(list(arguments))
