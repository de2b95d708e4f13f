"""Several reward functions become one number per completion, and statistics that an abstention cannot poison.

What a value of None means: the function had nothing to say about this completion. It is left out of sums and means,
never counted as 0.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.errors import InputError
from gruppo.reward.returned import FLOAT32_MAX
from gruppo.reward.tally import Tally

_log = logging.getLogger(__name__)

_HUGE = 1e18
"""The square of a larger reward is infinite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The rewards of one step, in the order of its completions."""

    totals: list[float | None]
    """Weighted sum per completion; None where every function with a weight abstained."""
    values: dict[str, list[float | None]]
    """Each function's own values."""
    correct: list[bool | None]
    """Whether each answer is right: the value of the function that decides it is at least its threshold. None where
    that function abstained."""
    metrics: dict[str, float]
    """`reward/{mean,std}` of the totals, `reward/correct_frac`,
    `reward/<name>/{mean,std,abstain_frac,error_frac,timeout_frac}`, and what the functions logged as
    `reward/<name>/<metric>`. A mean of nothing is left out."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that the functions logged, None where they said nothing."""
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of each function that failed: completion -> traceback or reason."""

    @property
    def tracebacks(self) -> dict[str, str]:
        """The first failure of each function that had one."""
        return {name: reasons[min(reasons)] for name, reasons in self.failures.items()}


def weighted_totals(values: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Sum of weight times value over the functions that did not abstain.

    A function of weight 0 is there to be looked at: it does not turn an abstention into a reward of 0.

    >>> weighted_totals({"a": [1.0, None, None], "b": [3.0, 3.0, None]}, {"a": 1.0, "b": 0.5})
    [2.5, 1.5, None]
    """
    if set(values) != set(weights):
        raise InputError(f"values are of {sorted(values)}, weights of {sorted(weights)}; give one weight per function")
    if len({len(column) for column in values.values()}) > 1:
        sizes = {name: len(column) for name, column in values.items()}
        raise InputError(f"every function needs one value per completion, got {sizes}")
    counted = [name for name in values if weights[name] != 0.0] or list(values)
    totals: list[float | None] = []
    for row in zip(*(values[name] for name in counted), strict=True):
        terms = [weights[name] * value for name, value in zip(counted, row, strict=True) if value is not None]
        total = sum(terms) if terms else None
        if total is not None and not abs(total) <= FLOAT32_MAX:
            _log.warning("a total reward of %g does not fit into float32 and is left out", total)
            total = None
        totals.append(total)
    return totals


def statistics(values: Sequence[float | None]) -> dict[str, float]:
    """Mean and population standard deviation of what is not None; empty when all is.

    >>> statistics([1.0, None, 3.0])
    {'mean': 2.0, 'std': 1.0}
    """
    present = [value for value in values if value is not None]
    if not present:
        return {}
    if min(present) == max(present):  # rounding must not give equal values a spread
        return {"mean": present[0], "std": 0.0}
    # Exactly rounded sums do not depend on the order in which workers answer. Scaled, since a square may overflow.
    mean = math.fsum(present) / len(present)
    scale = max(abs(value - mean) for value in present)
    spread = math.fsum(((value - mean) / scale) ** 2 for value in present) / len(present)
    return {"mean": mean, "std": scale * math.sqrt(spread)}


def gather(
    tallies: Mapping[str, Tally], weights: Mapping[str, float], *, correct_by: str, correct_at: float
) -> RewardResult:
    """Totals, correctness, metrics and logged columns of a finished step.

    Args:
        correct_by: name of the function whose value decides whether an answer is right.
        correct_at: the least value of that function that means right.
    """
    values = {name: tally.values for name, tally in tallies.items()}
    totals = weighted_totals(values, weights)
    metrics = {f"reward/{key}": value for key, value in statistics(totals).items()}
    extras: dict[str, list[Any]] = {}
    for name, tally in tallies.items():
        shares = tally.fractions() if totals else {}
        own = {**_logged_means(tally), **statistics(tally.values), **shares}
        metrics.update({f"reward/{name}/{key}": value for key, value in own.items()})
        for column, logged in tally.extras.items():
            key = f"{name}/{column}" if column in extras else column
            extras[key] = [logged.get(index) for index in range(len(totals))]
        largest = max((abs(value) for value in tally.values if value is not None), default=0.0)
        if largest > _HUGE:
            _log.warning("reward %r returned %g; values of this size drown every other reward", name, largest)
    correct = [None if value is None else value >= correct_at for value in values[correct_by]]
    judged = [is_right for is_right in correct if is_right is not None]
    if judged:
        metrics["reward/correct_frac"] = sum(judged) / len(judged)
    return RewardResult(
        totals=totals,
        values=values,
        correct=correct,
        metrics=metrics,
        extras=extras,
        failures={name: dict(tally.reasons) for name, tally in tallies.items() if tally.reasons},
    )


def merged_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """The metrics of several calls as if they had been one: shares and logged metrics by the number of completions."""
    if len(results) == 1:
        return dict(results[0].metrics)
    metrics: dict[str, float] = {}
    for key in dict.fromkeys(key for result in results for key in result.metrics):
        there = [(result.metrics[key], len(result.totals)) for result in results if key in result.metrics]
        metrics[key] = math.fsum(value * num for value, num in there) / max(sum(num for _, num in there), 1)
    columns = {"reward": [total for result in results for total in result.totals]}
    for name in results[0].values if results else ():
        columns[f"reward/{name}"] = [value for result in results for value in result.values[name]]
    for name, values in columns.items():
        metrics |= {f"{name}/{key}": value for key, value in statistics(values).items()}
    judged = [is_right for result in results for is_right in result.correct if is_right is not None]
    if judged:
        metrics["reward/correct_frac"] = sum(judged) / len(judged)
    return metrics


def _logged_means(tally: Tally) -> dict[str, float]:
    """Each logged metric, averaged over the calls by their number of completions."""
    return {
        metric: math.fsum(value * num for value, num in calls) / sum(num for _, num in calls)
        for metric, calls in tally.metrics.items()
    }
