"""Budget of a reward's failures: how many end the run."""

from collections import deque

from gruppo.errors import RewardError
from gruppo.reward.call import StepCompletions
from gruppo.reward.result import Outcome

_MAX_FAILED = 0.5
"""Share of the last completions on which a function may fail, in whatever way."""
_FREE_FAILURES = 16
"""Fewer failures than this are tolerated whatever their share, so that one bad group does not stop a run."""
_WINDOW = 2 * _FREE_FAILURES
"""Small steps are counted together with earlier ones, up to this many completions."""
_FIRST_TIMEOUTS = 8
"""Timeouts without a success that end the first step. Otherwise a function that waits for a dead server would hold the
run for the deadline times the number of completions."""


class Budget:
    """Failures that one reward function may have: half of a step, or of the last steps where those are small."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        """Failures and completions of the last steps."""

    def check(self, outcome: Outcome, given: StepCompletions) -> None:
        """Raise a `RewardError` as soon as a step has too many failures, without waiting for the rest of it."""
        failed, num = len(outcome.reasons), given.num
        is_hanging = outcome.failures["timeout"] >= _FIRST_TIMEOUTS and not outcome.has_scored
        if given.step == 0 and (failed == num or is_hanging):
            raise _too_many(outcome, given, "nothing succeeded at the first step")
        if given.num < _FREE_FAILURES:
            for earlier_failed, earlier_num in reversed(self._steps):
                failed, num = failed + earlier_failed, num + earlier_num
                if num >= _WINDOW:
                    break
        if failed >= _FREE_FAILURES and failed > _MAX_FAILED * num:
            limit = f"{failed} of the last {num} completions failed, the budget is {_MAX_FAILED:.0%}"
            raise _too_many(outcome, given, limit)

    def close_step(self, outcome: Outcome) -> None:
        """Count a finished step."""
        self._steps.append((len(outcome.reasons), len(outcome.values)))


def _too_many(outcome: Outcome, given: StepCompletions, limit: str) -> RewardError:
    first = min(outcome.reasons)  # not the first to arrive: workers answer in any order
    errors, timeouts, deaths = (outcome.failures[kind] for kind in ("raised", "timeout", "died"))
    return RewardError(
        f"reward {outcome.name!r} failed on {len(outcome.reasons)} of {given.num} completions at step {given.step} "
        f"({errors} errors, {timeouts} timeouts, {deaths} dead workers): {limit}. "
        f"First failure, on {given.describe(first)}:\n{outcome.reasons[first]}"
    )
