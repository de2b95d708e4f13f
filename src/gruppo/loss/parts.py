"""Parts that every loss has: the level, the surrogate and the aggregation; and traits of a part.

    level(inputs) -> [T]                  the log-ratio of a token: its own, or its sequence's
    surrogate(log_ratio_T, inputs) -> [T] the loss of a token, to be minimised
    aggregate(segments, totals) -> [S]    the weight of each sequence's tokens: loss = sum_t weight_t * loss_t

A part is any callable with the right signature. Its docstring or `__str__` is what `repr(loss)` prints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gruppo.batch.packed import Count, Totals
from gruppo.batch.segments import Segments
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs

__all__ = [
    "Clip", "ClippedMean", "ClippedWeight", "ConstantLength", "DualClip", "GammaWeight", "LogProb", "PolicyGradient",
    "SoftGate", "local_token_mean", "part", "sampler_level", "sequence_level", "sequence_mean",
    "sequence_mean_token_sum", "sequence_sum_level", "sequence_token_level", "token_level", "token_mean", "token_sum",
]  # fmt: skip

MAX_LOG_RATIO = 20.0
"""Bound of a token's log-ratio: e^20 is far outside any trust region, and float32 overflows at e^88. The gradient is 0
beyond it."""
MIN_LOG_SUM = math.log(1e-8)

P = TypeVar("P", bound=Callable[..., Any])

TRAITS: dict[str, Any] = {
    "per_token": False,  # a token's result depends on that token alone, and on numbers of the whole step
    "zero_without_advantage": False,  # surrogate, term: no value and no gradient where the advantage is 0
    "needs": (),  # optional inputs that it needs: ref_logps, sampler_logps, entropies
    "draws_tokens": False,  # weight: it draws tokens at random, by their places in the step
    "holds_rho": False,  # level: its ratio is over the sampler; weight: it multiplies by rho = old / sampler
    "sequence_ratio": False,  # level: one ratio per sequence, so metrics count sequences
    "caps_every_sign": False,  # surrogate: the bound acts whatever the sign of the advantage, so metrics count both
    "survey_reads_policy": True,  # the survey of the step needs log-probs, not only labels and advantages
}


def part(**traits: Any) -> Callable[[P], P]:
    """Declare traits of a function or class. On a class, a trait may be a function of the instance.

    >>> @part(per_token=True, needs={"sampler_logps"})
    ... def gap(inputs):
    ...     return inputs.logps - inputs.sampler_logps
    >>> trait(gap, "per_token"), trait(gap, "draws_tokens")
    (True, False)
    """
    for name in traits:
        if name not in TRAITS:
            raise TypeError(f"part() got an unexpected trait {name!r}; there are {', '.join(TRAITS)}")

    def attach(made: P) -> P:
        for name, value in traits.items():
            setattr(made, name, property(value) if callable(value) else value)
        return made

    return attach


def trait(made: Any, name: str) -> Any:
    """Trait of a part, or its safe default."""
    return getattr(made, name, TRAITS[name])


def describe(made: Any) -> str:
    """Part in words: its `str`, or the first line of its docstring; for several parts, their product."""
    if isinstance(made, tuple):
        return describe(made[0]) if len(made) == 1 else " * ".join(f"({describe(each)})" for each in made)
    if type(made).__str__ is not object.__str__ and not isinstance(made, type):
        return str(made)
    documentation = (getattr(made, "__doc__", None) or "").strip()
    return documentation.splitlines()[0] if documentation else getattr(made, "__name__", repr(made))


# --- levels ---------------------------------------------------------------------------------------------------------


@part(per_token=True)
def token_level(inputs: LossInputs) -> Tensor:
    """r_t = exp(logp_t - old_t), each token its own"""
    # hardtanh is clamp with a one-pass backward
    return F.hardtanh(inputs.logps - inputs.old_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO, inplace=True)


@part(per_token=True, needs={"sampler_logps"}, holds_rho=True)
def sampler_level(inputs: LossInputs) -> Tensor:
    """r_t = exp(logp_t - sampler_t): over the policy as the sampler computed it"""
    assert inputs.sampler_logps is not None, "PolicyLoss checks `needs` before it calls a level"
    return F.hardtanh(inputs.logps - inputs.sampler_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO, inplace=True)


@part(sequence_ratio=True)
def sequence_level(inputs: LossInputs) -> Tensor:
    """s = exp(mean_t(logp_t - old_t)), the geometric mean over the sequence

    GSPO, arXiv:2507.18071.
    """
    segments = inputs.segments
    return segments.spread(segments.mean(token_level(inputs)))


@part(sequence_ratio=True)
def sequence_token_level(inputs: LossInputs) -> Tensor:
    """s_t = sg(s) * exp(logp_t - sg(logp_t)): the sequence's value, the token's gradient

    GSPO-token, arXiv:2507.18071: as GSPO for one advantage per sequence, and it admits one per token.
    """
    return sequence_level(inputs).detach() + (inputs.logps - inputs.logps.detach())


def sequence_sum_level(inputs: LossInputs) -> Tensor:
    """w = exp(sum_t(logp_t - old_t)), the unbiased weight of the whole sequence

    VESPO, arXiv:2602.10693. The sum is bounded to [log 1e-8, 20].
    """
    segments = inputs.segments
    return segments.spread(segments.sum(token_level(inputs)).clamp(MIN_LOG_SUM, MAX_LOG_RATIO))


@dataclass(frozen=True)
class ClippedMean:
    """GMPO, arXiv:2507.20673: each token's log-ratio is clipped on the side its advantage pushes, then averaged.

    The bounds are distances in log space; the paper uses 0.4.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        if not (self.low > 0 and self.high > 0):
            raise InputError(f"low and high must be positive, got {self.low!r} and {self.high!r}")

    def __str__(self) -> str:
        bounds = f"at most {self.high:g} where A > 0, at least -{self.low:g} where A < 0"
        return f"s = exp(mean_t(d_t)), d = logp - old, {bounds}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        log_ratio_T, advantages_T = token_level(inputs), inputs.advantages
        clipped_T = torch.where(advantages_T > 0, log_ratio_T.clamp(max=self.high), log_ratio_T.clamp(min=-self.low))
        segments = inputs.segments
        return segments.spread(segments.mean(clipped_T))


# --- surrogates -----------------------------------------------------------------------------------------------------


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate, arXiv:1707.06347; with high > low DAPO's clip-higher, arXiv:2503.14476."""

    low: float = 0.2
    high: float = 0.2

    def __str__(self) -> str:
        return f"-min(r*A, clip(r, {1 - self.low:g}, {1 + self.high:g})*A)"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        # min(r*A, clip(r)*A) = min(r*A, most) = most - relu(most - r*A), where most = (1 + high)*A for A > 0 and
        # (1 - low)*A for A < 0. torch.min has a slow backward: it looks for ties.
        advantages_T = inputs.advantages
        most_T = F.leaky_relu(advantages_T, (1 - self.low) / (1 + self.high)).mul_(1 + self.high)
        return torch.addcmul(most_T, log_ratio_T.exp(), advantages_T, value=-1).relu_() - most_T


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class DualClip:
    """Clip, and for A < 0 a cap on the ratio, arXiv:1912.09729; also the two-sided clip of arXiv:2505.07291."""

    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0

    def __post_init__(self) -> None:
        if self.cap <= 1 + self.high:
            raise InputError(f"cap must exceed 1 + high = {1 + self.high:g}, got {self.cap:g}; 3 is usual")

    def __str__(self) -> str:
        return f"{Clip(self.low, self.high)}, and at most -{self.cap:g}*A where A < 0"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        clip_T = Clip(self.low, self.high)(log_ratio_T, inputs)
        capped_T = torch.min(clip_T, -self.cap * inputs.advantages)
        return torch.where(inputs.advantages < 0, capped_T, clip_T)


@part(per_token=True, zero_without_advantage=True, caps_every_sign=True)
@dataclass(frozen=True)
class ClippedWeight:
    """CISPO, arXiv:2506.13585: the capped ratio weighs the gradient of log p; no token's gradient is cut off."""

    high: float = 0.2

    def __str__(self) -> str:
        return f"-sg(min(r, {1 + self.high:g}))*A*logp"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        weight_T = log_ratio_T.detach().exp().clamp(max=1 + self.high)
        return -weight_T * inputs.advantages * inputs.logps


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class SoftGate:
    """SAPO, arXiv:2511.20347: a sigmoid gate on the ratio, with its own temperature for each sign of A."""

    tau_positive: float = 1.0
    tau_negative: float = 1.0

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise InputError(f"tau must be positive, got ({self.tau_positive:g}, {self.tau_negative:g})")

    def __str__(self) -> str:
        return f"-(4/tau)*sigmoid(tau*(r - 1))*A, tau = {self.tau_positive:g} if A > 0 else {self.tau_negative:g}"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        advantages_T = inputs.advantages
        tau_T = torch.full_like(advantages_T, self.tau_negative)
        tau_T = tau_T.masked_fill(advantages_T > 0, self.tau_positive)
        # expm1, because the gate is a function of r - 1, which is small where it matters
        return -torch.sigmoid(tau_T * log_ratio_T.expm1()) * (4 / tau_T) * advantages_T


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class PolicyGradient:
    """The ratio without a trust region; on-policy its gradient is REINFORCE's."""

    def __str__(self) -> str:
        return "-r*A"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return -log_ratio_T.exp() * inputs.advantages


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class LogProb:
    """REINFORCE: the log-prob itself, without a ratio. Its gradient is that of `PolicyGradient` at r = 1."""

    def __str__(self) -> str:
        return "-A*logp"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logps


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class GammaWeight:
    """VESPO, arXiv:2602.10693: phi(w) = e^l * w^k * e^(-l*w) weighs the gradient of log p; phi(1) = 1."""

    positive: tuple[float, float] = (2.0, 3.0)  # (k, l) where A >= 0
    negative: tuple[float, float] = (3.0, 2.0)  # (k, l) where A < 0

    def __str__(self) -> str:
        return f"-sg(e^l*w^k*e^(-l*w))*A*logp, (k, l) = {self.positive} if A >= 0 else {self.negative}"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        log_w_T = log_ratio_T.detach()
        is_negative_T = inputs.advantages < 0
        k_T = torch.full_like(log_w_T, self.positive[0]).masked_fill(is_negative_T, self.negative[0])
        l_T = torch.full_like(log_w_T, self.positive[1]).masked_fill(is_negative_T, self.negative[1])
        weight_T = (l_T + k_T * log_w_T - l_T * log_w_T.exp()).exp()
        return -weight_T * inputs.advantages * inputs.logps


# --- aggregations: the denominators are those of the step, so that losses of micro-batches and ranks add up ---------


def sequence_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over sequences of the mean over their tokens"""
    return _one_over(segments, totals.sequences) / segments.length.clamp(min=1)


def token_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over all tokens of the step"""
    return _one_over(segments, totals.tokens)


def local_token_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over the tokens of the local batch, which is the whole step unless the totals say otherwise"""
    assert totals.local_tokens is not None
    return totals.local_share * _one_over(segments, totals.local_tokens)


def sequence_mean_token_sum(segments: Segments, totals: Totals) -> Tensor:
    """mean over sequences of the sum over their tokens"""
    return _one_over(segments, totals.sequences)


def token_sum(segments: Segments, totals: Totals) -> Tensor:
    """sum over all tokens of the step, divided by nothing"""
    return _one_over(segments, 1)


@dataclass(frozen=True)
class ConstantLength:
    """Dr. GRPO, arXiv:2503.20783: a constant in place of each sequence's own length."""

    max_completion_length: int = 1024

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise InputError(f"max_completion_length must be at least 1, got {self.max_completion_length}")

    def __str__(self) -> str:
        return f"sum over tokens / (sequences * {self.max_completion_length})"

    def __call__(self, segments: Segments, totals: Totals) -> Tensor:
        return _one_over(segments, totals.sequences * self.max_completion_length)


def _one_over(segments: Segments, count: Count) -> Tensor:
    """1 / count for each sequence. A step without tokens divides its empty sum by 1 and gives exactly 0."""
    if isinstance(count, Tensor):
        return (1 / count.to(torch.float64).clamp(min=1)).expand(segments.num_sequences)
    # `full` and not a tensor made of the number: copying one to a GPU would make the host wait
    size, device = (segments.num_sequences,), segments.offsets.device
    return torch.full(size, 1 / max(count, 1), dtype=torch.float64, device=device)
