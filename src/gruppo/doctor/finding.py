"""Finding: a likely fault of a run; and the windows of steps that rules look at."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gruppo.doctor.table import Points

FEWEST_STEPS = 5
"""Fewest steps to judge a run by; fewer are noise."""
WINDOW = 20
"""Steps that a number is averaged over before it is judged: one bad step is not a fault."""

REWARD, CORRECT, LENGTH = "reward/mean", "reward/correct_frac", "completion/len_mean"
ENTROPY, NORM, SKIPPED, DEAD_FRAC = "rollout/entropy", "optim/grad_norm", "optim/skipped", "group/dead_frac"

Severity = Literal["problem", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A likely fault of a run."""

    rule: str
    severity: Severity
    """`problem`: the run does not learn what it should. `warning`: it may, at a cost."""
    step: int | None
    """The step it began at; None for the whole run."""
    text: str
    """The likely fault, in words."""
    evidence: str
    remedy: str
    metric: str | None = None
    """Metric whose chart shows it."""

    def __str__(self) -> str:
        return f"{self.evidence}: {self.remedy}"


# --- windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps whose window mean was beyond a bound."""

    begin: int
    last: int
    worst: float
    """Mean farthest from the bound."""
    mean: float
    """Mean over all of these steps."""
    is_now: bool
    """True if the last window is one of them."""

    @property
    def when(self) -> str:
        return f"since step {self.begin}" if self.is_now else f"in steps {self.begin} to {self.last}"


def _means(points: Points) -> tuple[int, list[float]]:
    """Length of a window, and the mean of each window; no means for too few points."""
    width = min(WINDOW, len(points))
    if len(points) < FEWEST_STEPS:
        return width, []
    values = np.array([value for _, value in points], float)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    # Rounding must not take a mean beyond its values.
    return width, np.clip((sums[width:] - sums[:-width]) / width, windows.min(-1), windows.max(-1)).tolist()


def beyond(points: Points, bound: float, *, above: bool = True) -> Stretch | None:
    """Latest run of windows whose mean is above (or below) a bound; None if there is none."""
    width, means = _means(points)
    sign = 1 if above else -1
    is_out = [sign * mean > sign * bound for mean in means]
    if not any(is_out):
        return None
    first = last = max(i for i, out in enumerate(is_out) if out)
    while first and is_out[first - 1]:
        first -= 1
    begin = next(i for i in range(first, first + width) if sign * points[i][1] > sign * bound)
    worst = max(means[first : last + 1], key=lambda mean: sign * mean)
    mean = float(np.mean([value for _, value in points[begin : last + width]]))
    return Stretch(points[begin][0], points[last + width - 1][0], worst, mean, last == len(means) - 1)


SURE = 2.0
"""Standard errors that a change needs to count as one."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value at both ends of a run: means over the first and last window, which do not overlap."""

    first: float
    last: float
    error: float
    """Standard error of the difference, from the spread within the windows."""

    @classmethod
    def of(cls, points: Points) -> "Change | None":
        """The change of a series; None with too few points for two windows of `FEWEST_STEPS`.

        >>> Change.of([(step, float(step > 5)) for step in range(1, 11)])
        Change(first=0.0, last=1.0, error=0.0)
        """
        values = np.array([value for _, value in points], float)
        width = min(WINDOW, len(values) // 2)
        if width < FEWEST_STEPS:
            return None
        first, last = values[:width], values[-width:]
        error = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / width))
        return cls(float(first.mean()), float(last.mean()), error)

    def rises(self, by: float = 0.0) -> bool:
        return self.last - self.first > max(SURE * self.error, by)

    def falls(self, by: float = 0.0) -> bool:
        return self.first - self.last > max(SURE * self.error, by)

    def __str__(self) -> str:
        return f"{self.first:.3g} -> {self.last:.3g}"


def departure(points: Points, bound: float, *, above: bool = False) -> int | None:
    """Step from which a value stayed beyond a bound."""
    last = None
    for step, value in points:
        is_out = value > bound if above else value < bound
        last = (step if last is None else last) if is_out else None
    return last
