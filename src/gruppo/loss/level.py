"""The importance level: whose log-ratio a token carries.

A level takes LossInputs and gives the log-ratio `[T]`; the surrogate exponentiates it. Log-ratios of single tokens
are bounded to +-20 before anything else is done with them: e^20 is far outside every trust region, and float32
overflows at e^88. Outside the bound the gradient is 0.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs
from gruppo.loss.traits import describe, part, trait
from gruppo.loss.weights import TokenWeight, as_tuple, corrected

__all__ = [
    "ClippedMean", "CorrectedSum", "sampler_level", "sequence_level", "sequence_sum_level", "sequence_token_level",
    "token_level",
]  # fmt: skip

MAX_LOG_RATIO = 20.0
MIN_LOG_SUM = math.log(1e-8)


@part(per_token=True)
def token_level(inputs: LossInputs) -> Tensor:
    """r_t = exp(logp_t - old_t), each token its own"""
    return _bounded(inputs.logps - inputs.old_logps)


@part(per_token=True, needs={"sampler_logps"}, holds_rho=True)
def sampler_level(inputs: LossInputs) -> Tensor:
    """r_t = exp(logp_t - sampler_t): over the policy as the sampler computed it

    No log-probs are computed again before training: staleness and numerical gap are in one ratio.
    """
    assert inputs.sampler_logps is not None, "PolicyLoss checks `needs` before it calls a level"
    return _bounded(inputs.logps - inputs.sampler_logps)


@part(sequence_ratio=True)
def sequence_level(inputs: LossInputs) -> Tensor:
    """s = exp(mean_t(logp_t - old_t)), the geometric mean over the sequence

    GSPO, arXiv:2507.18071. The gradient reaches every token of the sequence through the mean.
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


@part(
    needs=lambda level: frozenset().union(*(trait(weight, "needs") for weight in as_tuple(level.correction))),
    holds_rho=lambda level: any(trait(weight, "holds_rho") for weight in as_tuple(level.correction)),
)
@dataclass(frozen=True)
class CorrectedSum:
    """`sequence_sum_level` with a correction's weights inside the product instead of in front of the loss.

    VESPO, arXiv:2602.10693: what bends w must see all of w, the sampler's gap included.
    """

    correction: TokenWeight | tuple[TokenWeight, ...]

    def __post_init__(self) -> None:
        for weight in as_tuple(self.correction):
            if not trait(weight, "per_token"):
                raise InputError(
                    f"the product over a sequence takes one weight per token, and {weight!r} gives one per sequence; "
                    "use TruncatedWeight() or MaskedWeight() at token level"
                )

    def __str__(self) -> str:
        return f"w = exp(sum_t(logp_t - old_t + log(c_t))), c = {describe(as_tuple(self.correction))}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        segments = inputs.segments
        log_weight_T = corrected(self.correction, inputs).clamp(1e-8, math.exp(MAX_LOG_RATIO)).log()
        log_w_S = segments.sum(token_level(inputs)) + segments.sum(log_weight_T)
        return segments.spread(log_w_S.clamp(MIN_LOG_SUM, MAX_LOG_RATIO))


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


def _bounded(log_ratio_T: Tensor) -> Tensor:
    # hardtanh is clamp with a one-pass backward
    return F.hardtanh(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO, inplace=True)
