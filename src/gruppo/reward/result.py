"""RewardResult: totals, correctness and metrics of a step, made of the outcome of each reward function."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.errors import InputError
from gruppo.process.streams import printable
from gruppo.reward.call import FLOAT32_MAX, CallResult

_log = logging.getLogger(__name__)

_HUGE = 1e18
"""The square of a larger reward is infinite in float32."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Scores and failures of one reward function in one step, filled in as results come."""

    name: str
    values: list[float | None]
    has_scored: bool = False
    """A call gave a value, None included."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failures by `ResultKind`; NaN and infinities count as `raised`."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Completion -> traceback or reason, of every failure."""
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Logged columns: completion -> value."""
    metrics: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Logged metrics: value and number of completions of each call."""

    def enter(self, indices: Sequence[int], result: CallResult, failure_score: float) -> None:
        """Enter the result of a call whose values count."""
        if result.kind != "scored":
            self.failures[result.kind] += len(indices)
            self.reasons |= dict.fromkeys(indices, printable(result.text))
            if result.kind != "raised":
                for index in indices:
                    self.values[index] = failure_score
            return
        self.has_scored |= len(result.non_finite) < len(indices)
        for index, value in zip(indices, result.values, strict=True):
            self.values[index] = value
        for place in result.non_finite:
            self.failures["raised"] += 1
            self.reasons[indices[place]] = "it returned NaN, an infinity, or a number beyond float32"
        for column, logged in result.extras.items():
            self.extras.setdefault(column, {}).update(zip(indices, logged, strict=True))
        for metric, value in result.metrics.items():
            self.metrics.setdefault(metric, []).append((value, len(indices)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Rewards of one step, in the order of its completions."""

    totals: list[float | None]
    """Weighted sum per completion; None where every function with a weight abstained."""
    values: dict[str, list[float | None]]
    """Each function's own values."""
    correct: list[bool | None]
    """True for a right answer: the value of the function that decides it is at least its threshold. None where that
    function abstained, or no function decides."""
    metrics: dict[str, float]
    """`reward/{mean,std}` of the totals, `reward/correct_frac`,
    `reward/<name>/{mean,std,abstain_frac,error_frac,timeout_frac}`, and what the functions logged as
    `reward/<name>/<metric>`. A mean of nothing is left out."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that the functions logged, None where there is no value."""
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of each function that failed: completion -> traceback or reason."""

    @property
    def tracebacks(self) -> dict[str, str]:
        """The first failure of each function that had one."""
        return {name: reasons[min(reasons)] for name, reasons in self.failures.items()}


def combined(
    outcomes: Sequence[Outcome], weights: Mapping[str, float], correct_by: str | None, correct_at: float
) -> RewardResult:
    """Totals, correctness, metrics and logged columns of a finished step."""
    values = {outcome.name: outcome.values for outcome in outcomes}
    totals = weighted_totals(values, weights)
    decided = [None] * len(totals) if correct_by is None else values[correct_by]
    correct = [None if value is None else value >= correct_at for value in decided]
    means: dict[str, tuple[float, int]] = {}
    extras: dict[str, list[Any]] = {}
    for outcome in outcomes:
        logged = {
            name: (math.fsum(value * num for value, num in calls), sum(num for _, num in calls))
            for name, calls in outcome.metrics.items()
        }
        shares = {
            "abstain_frac": outcome.values.count(None),
            "error_frac": outcome.failures["raised"] + outcome.failures["died"],
            "timeout_frac": outcome.failures["timeout"],
        }
        logged |= {name: (count, len(totals)) for name, count in shares.items()}
        means |= {f"reward/{outcome.name}/{name}": mean for name, mean in logged.items()}
        for column, by_index in outcome.extras.items():
            key = f"{outcome.name}/{column}" if column in extras else column
            extras[key] = [by_index.get(index) for index in range(len(totals))]
        largest = max((abs(value) for value in outcome.values if value is not None), default=0.0)
        if largest > _HUGE:
            _log.warning("reward %r returned %g; values of this size drown every other reward", outcome.name, largest)
    return RewardResult(
        totals=totals,
        values=values,
        correct=correct,
        metrics=_metrics(totals, values, correct, means),
        extras=extras,
        failures={outcome.name: outcome.reasons for outcome in outcomes if outcome.reasons},
    )


def merged_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """The metrics of several calls as if they had been one: shares and logged metrics by the number of completions."""
    if len(results) == 1:
        return dict(results[0].metrics)
    means: dict[str, tuple[float, int]] = {}
    for key in dict.fromkeys(key for result in results for key in result.metrics):
        there = [(result.metrics[key], len(result.totals)) for result in results if key in result.metrics]
        means[key] = (math.fsum(value * num for value, num in there), sum(num for _, num in there))
    totals = [total for result in results for total in result.totals]
    names = results[0].values if results else ()
    values = {name: [value for result in results for value in result.values[name]] for name in names}
    return _metrics(totals, values, [is_right for result in results for is_right in result.correct], means)


def _metrics(
    totals: Sequence[float | None],
    values: Mapping[str, Sequence[float | None]],
    correct: Sequence[bool | None],
    means: Mapping[str, tuple[float, int]],
) -> dict[str, float]:
    """Metrics of scored completions: statistics of totals and values, share of right answers, and other means.

    Args:
        means: sum and count by key. Where a function logged a metric by the name of a statistic, the statistic stays.
    """
    columns = {"reward": totals} | {f"reward/{name}": column for name, column in values.items()}
    metrics = {f"{name}/{key}": value for name, column in columns.items() for key, value in statistics(column).items()}
    judged = [is_right for is_right in correct if is_right is not None]
    if judged:
        metrics["reward/correct_frac"] = sum(judged) / len(judged)
    return metrics | {key: total / num for key, (total, num) in means.items() if num and key not in metrics}


def weighted_totals(values: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Sum of weight times value over the functions that did not abstain.

    A weight of 0 means "log only": such a function does not turn an abstention into a reward of 0.

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
    """Mean and population standard deviation of the values that are not None; empty if all are.

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
