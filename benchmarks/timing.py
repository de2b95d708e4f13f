"""Timing of contenders against each other: interleaved in one process, medians and quartiles, ratios.

A time means nothing without its neighbour. Every round times each contender once, and each round starts with the
next one, so that a busy moment of the machine or a cache left warm by the predecessor falls on all of them alike.
"""

import gc
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender's time per call in milliseconds."""

    q1: float
    median: float
    q3: float
    ratio: float
    """Its median over the median of the baseline."""
    ratio_min: float
    """The lowest of its time over the baseline's of the same round; for information."""
    cpu: float
    """The median of its processor time, in which waiting for a busy machine does not count."""
    cpu_ratio: float
    """Its median processor time over the baseline's."""


def settle_allocator() -> None:
    """Bring glibc's malloc into the state it has in a process that trains.

    Until a block of nearly 32 MB has been freed once, malloc hands the end of its heap back to the system as soon as a
    few MB of it are free. A call then pays for new pages or does not, depending on who ran before it.
    """
    block = torch.ones(31 * 2**20, dtype=torch.uint8)
    del block


def interleave(contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int) -> dict[str, Timing]:
    """Time the contenders round-robin; the first is the baseline of the ratios."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    was_enabled = gc.isenabled()
    gc.disable()  # a collection would fall on whoever happens to run
    try:
        for i in range(warmup + rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                call = contenders[name]
                cpu_start, start = process_time(), perf_counter()
                call()
                elapsed, cpu_elapsed = perf_counter() - start, process_time() - cpu_start
                if i >= warmup:
                    seconds[name].append(elapsed)
                    cpu_seconds[name].append(cpu_elapsed)
    finally:
        if was_enabled:
            gc.enable()
    wall, cpu = seconds[names[0]], cpu_seconds[names[0]]
    return {name: _summary(seconds[name], wall, cpu_seconds[name], cpu) for name in names}


def _summary(wall: list[float], baseline_wall: list[float], cpu: list[float], baseline_cpu: list[float]) -> Timing:
    q1, middle, q3 = quantiles(wall, n=4, method="inclusive")
    return Timing(
        q1=q1 * 1e3,
        median=middle * 1e3,
        q3=q3 * 1e3,
        ratio=middle / median(baseline_wall),
        ratio_min=min(s / b for s, b in zip(wall, baseline_wall, strict=True)),
        cpu=median(cpu) * 1e3,
        cpu_ratio=median(cpu) / median(baseline_cpu),
    )


def table(title: str, timings: Mapping[str, Timing]) -> str:
    """The timings as aligned text."""
    width = max(map(len, [title, *timings]))
    lines = [f"{title:{width}}  median ms     quartiles ms     ratio  lowest   CPU ms   ratio"]
    for name, t in timings.items():
        lines.append(
            f"{name:{width}}  {t.median:9.3f}  {t.q1:6.3f} - {t.q3:7.3f}  {t.ratio:6.2f}x  {t.ratio_min:5.2f}x"
            f"  {t.cpu:7.3f}  {t.cpu_ratio:5.2f}x"
        )
    return "\n".join(lines)


def as_json(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """The timings as plain numbers, rounded to what a clock can tell."""
    return {name: {key: round(value, 4) for key, value in asdict(t).items()} for name, t in timings.items()}


def machine() -> dict[str, Any]:
    """What the figures depend on, without anything that identifies the host."""
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def busy_note() -> str | None:
    """A warning when others want the cores that this process wants, else None."""
    cores, load = _cores(), os.getloadavg()[0]
    if load + torch.get_num_threads() <= cores + 0.5:
        return None
    return (
        f"The machine is busy: load {load:.1f} on {cores} cores before the start. Wall-clock medians then measure the "
        "scheduler, the more the more threads; --threads 1 and the CPU columns are what can be trusted."
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
