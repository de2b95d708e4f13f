"""The coefficient of the entropy bonus, and the target that moves it."""

from dataclasses import dataclass

from gruppo.loss.adaptive import AdaptiveEntropy


@dataclass(slots=True)
class EntropyBonus:
    """What the next step applies, and what is remembered while nothing is applied.

    >>> bonus = EntropyBonus(remembered=0.01, applied=0.01, rule=AdaptiveEntropy(target=0.2, change=0.005))
    >>> bonus.follow(0.5)  # entropy enough: nothing is applied, and less is remembered
    >>> bonus.remembered, bonus.applied
    (0.005, 0.0)
    >>> bonus.follow(0.1)
    >>> bonus.remembered, bonus.applied
    (0.01, 0.01)
    """

    remembered: float = 0.0
    applied: float = 0.0
    rule: AdaptiveEntropy | None = None
    """None: the coefficient stays."""

    def follow(self, entropy: float) -> None:
        """Move the coefficient after a step with this mean entropy."""
        if self.rule is not None:
            self.remembered = self.rule.next(self.remembered, entropy)
            self.applied = self.rule.applied(self.remembered, entropy)
