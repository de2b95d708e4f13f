"""Coefficients that follow a measured number: pure rules, from the coefficient of one step to that of the next.

The loss itself never changes between the micro-batches of a step; whoever runs the steps asks a rule here in between
and sets `loss.beta` or `loss.entropy_coef`. The state is one number, so resuming needs nothing else.
"""

from dataclasses import dataclass

from gruppo.errors import InputError


@dataclass(frozen=True)
class AdaptiveKL:
    """arXiv:1909.08593: beta grows while the KL is above its target and shrinks below.

        beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon)

    Args:
        target: the KL to hold.
        horizon: over how many units of `count` (sequences, say) beta can change by a fifth.

    >>> AdaptiveKL(target=0.1, horizon=100).next(0.5, kl=0.2, count=10)
    0.51
    """

    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0):
            raise InputError(f"target and horizon must be positive, got {self.target!r} and {self.horizon!r}")

    def next(self, beta: float, kl: float, count: int) -> float:
        """The coefficient of the next step, after one with `count` sequences whose mean KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return beta * (1 + error * count / self.horizon)


@dataclass(frozen=True)
class AdaptiveEntropy:
    """Skywork-OR1, arXiv:2505.22312: the bonus grows while the entropy is at or below its target, else shrinks.

    The bonus acts only while the entropy is at or below the target: `applied` gives what a step should use, `next`
    what to remember for the step after.

    >>> rule = AdaptiveEntropy(target=0.2, change=0.005)
    >>> rule.next(0.01, entropy=0.1), rule.applied(0.01, entropy=0.3)
    (0.015, 0.0)
    """

    target: float
    change: float = 0.005
    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not (self.change > 0 and self.lowest <= self.highest):
            raise InputError(
                f"change must be positive and lowest <= highest, got change={self.change!r}, lowest={self.lowest!r}, "
                f"highest={self.highest!r}"
            )

    def next(self, coef: float, entropy: float) -> float:
        """The coefficient to remember, after a step whose mean entropy was `entropy`."""
        moved = coef + self.change if entropy <= self.target else coef - self.change
        return min(max(moved, self.lowest), self.highest)

    def applied(self, coef: float, entropy: float) -> float:
        """The coefficient to use in the next step: 0 while there is entropy enough."""
        return coef if entropy <= self.target else 0.0
