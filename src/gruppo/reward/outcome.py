"""Outcome of scoring: values and failures of each function, their weighted totals, statistics, and the failure limit.

A value of None means that the function abstained. It is left out of sums and means, never counted as 0.

Failures are of two kinds. One that the model's text brought about (a verifier that never ends, a worker that dies)
costs the completion `failure_score`: abstaining would let the policy escape a penalty by breaking the verifier. One of
the function itself (an exception, a NaN) abstains. Both are counted.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.errors import InputError, RewardError
from gruppo.reward.call import FLOAT32_MAX, CallResult

_log = logging.getLogger(__name__)

_HUGE = 1e18
"""The square of a larger reward is infinite in float32."""

_MAX_FAILED_STEP = 0.5
"""Share of a step's completions on which a function may fail, in whatever way."""
_MAX_FAILED_RUN = 0.2
"""Share of all completions so far, beyond one step's worth, for which a function may raise or return NaN. Timeouts and
dead workers are caused by the model's text and do not count."""
_FREE_FAILURES = 16
"""Fewer failures than this are tolerated whatever their share, so that one bad group does not stop a run."""
_FIRST_TIMEOUTS = 8
"""Timeouts without a single success that end the first step: a function that waits for a dead server would otherwise
hold the run for the deadline times the number of completions."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Scores and failures of one reward function in one step, filled in as results come."""

    name: str
    values: list[float | None]
    scored: int = 0
    """Completions for which the function returned, None included."""
    errors: int = 0
    timeouts: int = 0
    deaths: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    """Completion -> traceback or reason, of every failure."""
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Logged columns: completion -> value."""
    metrics: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Logged metrics: value and number of completions of each call."""

    @property
    def failures(self) -> int:
        return self.errors + self.timeouts + self.deaths

    def add_scores(self, indices: Sequence[int], result: CallResult) -> None:
        for index, value in zip(indices, result.values, strict=True):
            self.values[index] = value
        for place in result.non_finite:
            self.errors += 1
            self.reasons[indices[place]] = "it returned NaN, an infinity, or a number beyond float32"
        self.scored += len(indices) - len(result.non_finite)
        for column, logged in result.extras.items():
            self.extras.setdefault(column, {}).update(zip(indices, logged, strict=True))
        for metric, value in result.metrics.items():
            self.metrics.setdefault(metric, []).append((value, len(indices)))

    def add_failure(self, index: int, result: CallResult, failure_score: float) -> None:
        if result.kind == "raised":
            self.errors += 1
        else:
            self.values[index] = failure_score
            self.timeouts += result.kind == "timeout"
            self.deaths += result.kind == "died"
        self.reasons[index] = result.text

    def means(self) -> dict[str, tuple[float, int]]:
        """Sum and count of each logged metric (by the completions of its calls) and of each kind of failure."""
        logged = {
            metric: (math.fsum(value * num for value, num in calls), sum(num for _, num in calls))
            for metric, calls in self.metrics.items()
        }
        num = len(self.values)
        return logged | {
            "abstain_frac": (sum(value is None for value in self.values), num),
            "error_frac": (self.errors + self.deaths, num),
            "timeout_frac": (self.timeouts, num),
        }


class FailureLimit:
    """Count of each function's failures over a run, which stops the run when there are too many.

    At step 0, a function that fails on every completion always stops the run.
    """

    def __init__(self) -> None:
        self._errors: dict[str, int] = {}
        self._completions: dict[str, int] = {}

    def check_step(self, outcome: Outcome, step: int, describe: Callable[[int], str]) -> None:
        """Raise as soon as a step has too many failures, without waiting for the rest of it.

        Args:
            describe: a completion, by its index, for the error text.
        """
        num, failures = len(outcome.values), outcome.failures
        if failures == 0:
            return
        if step == 0 and (failures == num or (outcome.timeouts >= _FIRST_TIMEOUTS and outcome.scored == 0)):
            raise RewardError(_explain(outcome, step, describe, "nothing succeeded at the first step"))
        if failures >= _FREE_FAILURES and failures > _MAX_FAILED_STEP * num:
            raise RewardError(_explain(outcome, step, describe, f"the budget is {_MAX_FAILED_STEP:.0%} of a step"))

    def close_step(self, outcome: Outcome, step: int, describe: Callable[[int], str]) -> None:
        """Add a finished step to the run, and raise when the run has too many errors."""
        errors = self._errors[outcome.name] = self._errors.get(outcome.name, 0) + outcome.errors
        num = self._completions[outcome.name] = self._completions.get(outcome.name, 0) + len(outcome.values)
        # One step's worth is free: early in a run, a share of all completions is a share of very few.
        allowed = _MAX_FAILED_RUN * num + len(outcome.values)
        if outcome.errors and errors >= _FREE_FAILURES and errors > allowed:
            limit = f"{errors} of {num} in this run, the budget is {_MAX_FAILED_RUN:.0%}"
            raise RewardError(_explain(outcome, step, describe, limit))


def _explain(outcome: Outcome, step: int, describe: Callable[[int], str], limit: str) -> str:
    first = min(outcome.reasons)  # not the first to arrive: workers answer in any order
    return (
        f"reward {outcome.name!r} failed on {outcome.failures} of {len(outcome.values)} completions at step {step} "
        f"({outcome.errors} errors, {outcome.timeouts} timeouts, {outcome.deaths} dead workers): {limit}. "
        f"First failure, on {describe(first)}:\n{outcome.reasons[first]}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Rewards of one step, in the order of its completions."""

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
    """Columns that the functions logged, None where there is no value."""
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of each function that failed: completion -> traceback or reason."""

    @property
    def tracebacks(self) -> dict[str, str]:
        """The first failure of each function that had one."""
        return {name: reasons[min(reasons)] for name, reasons in self.failures.items()}


def combine(
    outcomes: Sequence[Outcome], weights: Mapping[str, float], *, correct_by: str, correct_at: float
) -> RewardResult:
    """Totals, correctness, metrics and logged columns of a finished step.

    Args:
        correct_by: name of the function whose value decides whether an answer is right.
        correct_at: the least value of that function that means right.
    """
    values = {outcome.name: outcome.values for outcome in outcomes}
    totals = weighted_totals(values, weights)
    correct = [None if value is None else value >= correct_at for value in values[correct_by]]
    means = {f"reward/{outcome.name}/{key}": mean for outcome in outcomes for key, mean in outcome.means().items()}
    extras: dict[str, list[Any]] = {}
    for outcome in outcomes:
        for column, logged in outcome.extras.items():
            key = f"{outcome.name}/{column}" if column in extras else column
            extras[key] = [logged.get(index) for index in range(len(totals))]
        largest = max((abs(value) for value in outcome.values if value is not None), default=0.0)
        if largest > _HUGE:
            _log.warning("reward %r returned %g; values of this size drown every other reward", outcome.name, largest)
    return RewardResult(
        totals=totals,
        values=values,
        correct=correct,
        metrics=_metrics(totals, values, correct, means),
        extras=extras,
        failures={outcome.name: dict(outcome.reasons) for outcome in outcomes if outcome.reasons},
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
