"""KL to the reference as part of the reward, with a coefficient that may follow a target.

The other place for it is the loss (`beta`). In the reward it is a number per completion that no gradient passes
through, so it works with every loss and estimator:

    r_i <- r_i - coefficient * sum_t (log p_sampler(t) - log p_reference(t))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.loss.adaptive import AdaptiveKL
from gruppo.types import InputFeature, SampledSequence


@dataclass(slots=True)
class RewardKL:
    """The coefficient, and the target that `AdaptiveKL` moves it towards.

    >>> kl = RewardKL(coefficient=0.1, target=2.0, horizon=100)
    >>> kl.follow(6.0, completions=50)  # far too high: the error counts as 0.2
    >>> round(kl.coefficient, 6)
    0.11
    """

    coefficient: float = 0.0
    target: float | None = None
    horizon: int = 10_000

    def follow(self, kl: float, completions: int) -> None:
        """Move the coefficient after a step whose completions had this mean KL."""
        if self.target is not None:
            self.coefficient = AdaptiveKL(self.target, self.horizon).next(self.coefficient, kl, completions)


def sequence_kl(sequences: Sequence[SampledSequence], model: Any) -> list[float]:
    """The log-ratio of each completion to the reference, summed over its tokens, in float64."""
    features = [InputFeature(prompt_ids=s.prompt_ids, completion_ids=s.tokens) for s in sequences]
    reference = model.reference_logps(features)
    return [sum(s.logps) - float(ref.double().sum()) for s, ref in zip(sequences, reference, strict=True)]
