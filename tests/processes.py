"""Processes as a test sees them from outside, by /proc and by what they write."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def children_in(module: str, parent: int) -> list[int]:
    """Running children of a process whose command line names a module."""
    found: list[int] = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for number in (thread / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):  # so has the child
                    if module.encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                        found.append(int(number))
    return found


def is_running(number: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def steps_in(run: Path) -> int:
    """Whole lines of metrics that a run has written: its steps, and the evaluation before the first."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_until(is_true: Callable[[], object], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.01)
