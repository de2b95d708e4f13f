"""What one reward function made of one step: its values and its failures.

Failures are of two kinds. What the model's text brought about (a verifier that never ends, a worker that dies) costs
the completion `failure_score`: abstaining would let the policy escape a penalty by breaking the verifier. What the
function did by itself (an exception, a NaN) abstains. Both are counted; `budget.py` says when there are too many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.reward.call import Reply


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one function made of one step, filled in as replies come."""

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

    def add_scores(self, indices: Sequence[int], reply: Reply) -> None:
        for index, value in zip(indices, reply.values, strict=True):
            self.values[index] = value
        for place in reply.non_finite:
            self.errors += 1
            self.reasons[indices[place]] = "it returned NaN, an infinity, or a number beyond float32"
        self.scored += len(indices) - len(reply.non_finite)
        for column, logged in reply.extras.items():
            self.extras.setdefault(column, {}).update(zip(indices, logged, strict=True))
        for metric, value in reply.metrics.items():
            self.metrics.setdefault(metric, []).append((value, len(indices)))

    def add_failure(self, index: int, reply: Reply, failure_score: float) -> None:
        if reply.kind == "raised":
            self.errors += 1
        else:
            self.values[index] = failure_score
            self.timeouts += reply.kind == "timeout"
            self.deaths += reply.kind == "died"
        self.reasons[index] = reply.text

    @property
    def first_index(self) -> int | None:
        """Lowest completion that failed, not the first to arrive: workers answer in any order."""
        return min(self.reasons, default=None)

    def fractions(self) -> dict[str, float]:
        num = len(self.values)
        return {
            "abstain_frac": sum(value is None for value in self.values) / num,
            "error_frac": (self.errors + self.deaths) / num,
            "timeout_frac": self.timeouts / num,
        }
