"""Estimators that look at how long completions are."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gruppo.advantage.estimator import Estimator, Groups
from gruppo.errors import InputError

__all__ = ["LEADAdvantage", "LengthShapedAdvantage", "OPOAdvantage"]


@dataclass(frozen=True)
class OPOAdvantage(Estimator, name="opo", scale="none", needs=("lengths",)):
    """Reward minus the length-weighted mean of its group: OPO, arXiv:2505.23585.

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    The baseline of least variance when the gradient's size grows with the length of a completion.

    >>> OPOAdvantage()([1.0, 0.0], num_generations=2, lengths=[1, 3])
    tensor([ 0.7500, -0.2500])
    """

    def estimate(self, groups: Groups, lengths: Tensor) -> Tensor:
        baseline = groups.sum(lengths * groups.rewards) / groups.sum(lengths).clamp(min=1)
        return groups.result(groups.rewards - baseline[groups.group])


@dataclass(frozen=True)
class LengthShapedAdvantage(Estimator, name="length_shaped", scale="none", needs=("lengths",), uses=("correct",)):
    """Reward less a price for length that rises with how well the prompt is solved, then centred.

        s_i = r_i - weight * p_g * l_i / max_g l,   A_i = s_i - mean_g(s)

    p_g is the share of right completions, so a prompt without a right completion has no price for length. A group of
    right completions of different lengths has a signal. The shape is that of prime-rl's length cost.

    >>> LengthShapedAdvantage(weight=0.5)([1.0, 1.0], num_generations=2, lengths=[10, 20])
    tensor([ 0.1250, -0.1250])
    """

    weight: float = 0.1
    correct_at: float = 1.0
    """A reward of at least this is right, for a call without `correct`."""

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise InputError(f"weight must be 0 or more, got {self.weight!r}")

    def estimate(self, groups: Groups, lengths: Tensor, correct: Tensor | None) -> Tensor:
        solved, right = groups.judged(correct, self.correct_at)
        rate = solved.mean(right)
        longest = groups.shaped(lengths).highest().clamp(min=1)
        shaped = groups.shaped(groups.rewards - self.weight * (rate / longest)[groups.group] * lengths)
        return shaped.result(shaped.centered())


@dataclass(frozen=True)
class LEADAdvantage(Estimator, name="lead", needs=("lengths",), uses=("correct",), judges_answers=True):
    """Short right answers over long ones, and hard prompts over easy ones: GRPO-LEAD, arXiv:2504.09696.

        s_i = exp(-length_weight * z_i) if right, with z_i = (l_i - mean) / (std + eps) over the right ones of the group
        s_i = -1                        if wrong
        B_i = (s_i - mean_g(s)) / (std_g(s) + eps)
        A_i = B_i * w(p) if B_i > 0 else B_i * w(1 - p),   w(p) = low + (high - low) / (1 + exp(slope (p - middle)))

    p is the share of right completions. A rare success on a hard prompt and a rare failure on an easy one count most.

    >>> LEADAdvantage()([1.0, 0.0], num_generations=2, lengths=[10, 20])
    tensor([ 1.0017, -1.0017])
    """

    length_weight: float = 0.05
    low: float = 0.4
    high: float = 1.5
    middle: float = 0.75
    slope: float = 10.0
    """Smallest and largest weight of a prompt, and where and how steeply it falls between them: the paper's."""
    correct_at: float = 1.0
    """A reward of at least this is right, for a call without `correct`."""
    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups, lengths: Tensor, correct: Tensor | None) -> Tensor:
        groups, right = groups.judged(correct, self.correct_at)
        among_right = replace(groups, rewards=torch.where(right, lengths, 0), valid=right)
        z = among_right.centered() / (among_right.std("group", self.ddof) + self.eps)
        shaped = groups.shaped(torch.where(right, (-self.length_weight * z).exp(), -1.0))
        base = shaped.centered() / (shaped.std("group", self.ddof) + self.eps)
        rate = groups.mean(right)[groups.group]
        return shaped.result(base * torch.where(base > 0, self._prompt_weight(rate), self._prompt_weight(1 - rate)))

    def _prompt_weight(self, rate: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(-self.slope * (rate - self.middle))
