"""How often a reward function may fail before the run stops."""

from collections.abc import Callable
from dataclasses import dataclass

from gruppo.errors import InputError, RewardError
from gruppo.reward.tally import Tally

Describe = Callable[[int | None], str]
"""Turns the number of a completion into text for a message."""

_PROBES = 8
"""Timeouts without a single success that end the first step: a function that waits for a dead server would
otherwise hold the run for the deadline times the number of completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBudget:
    """Limits for each reward function. At step 0, failing on every completion always stops the run."""

    step_fraction: float = 0.5
    """Share of a step's completions that may fail, in whatever way."""
    run_fraction: float = 0.2
    """Share of all completions so far, beyond one step's worth, for which the function may raise or return NaN.
    Timeouts and dead workers are the model's doing and do not count."""
    grace: int = 16
    """Fewer failures than this are tolerated whatever their share, so that one bad group does not stop a run."""

    def __post_init__(self) -> None:
        for name in ("step_fraction", "run_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


class Account:
    """The failures of a whole run, held against a budget."""

    def __init__(self, budget: ErrorBudget) -> None:
        self._budget = budget
        self._errors: dict[str, int] = {}
        self._completions: dict[str, int] = {}

    def check_step(self, tally: Tally, step: int, describe: Describe) -> None:
        """Raise as soon as a step is over budget, without waiting for the rest of it."""
        num, failures = len(tally.values), tally.failures
        if failures == 0:
            return
        if step == 0 and (failures == num or (tally.timeouts >= _PROBES and tally.scored == 0)):
            raise RewardError(_explain(tally, step, describe, "nothing succeeded at the first step"))
        if failures >= self._budget.grace and failures > self._budget.step_fraction * num:
            limit = f"the budget is {self._budget.step_fraction:.0%} of a step"
            raise RewardError(_explain(tally, step, describe, limit))

    def close_step(self, tally: Tally, step: int, describe: Describe) -> None:
        """Add a finished step to the run, and raise when the run is over budget."""
        errors = self._errors[tally.name] = self._errors.get(tally.name, 0) + tally.errors
        num = self._completions[tally.name] = self._completions.get(tally.name, 0) + len(tally.values)
        # One step's worth is free: early in a run, a share of all completions is a share of very few.
        allowed = self._budget.run_fraction * num + len(tally.values)
        if tally.errors and errors >= self._budget.grace and errors > allowed:
            limit = f"{errors} of {num} in this run, the budget is {self._budget.run_fraction:.0%}"
            raise RewardError(_explain(tally, step, describe, limit))


def _explain(tally: Tally, step: int, describe: Describe, limit: str) -> str:
    first = tally.first_index
    reason = "" if first is None else tally.reasons[first]
    return (
        f"reward {tally.name!r} failed on {tally.failures} of {len(tally.values)} completions at step {step} "
        f"({tally.errors} errors, {tally.timeouts} timeouts, {tally.deaths} dead workers): {limit}. "
        f"First failure, on {describe(first)}:\n{reason}"
    )
