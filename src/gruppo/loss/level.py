"""The importance level: whose log-ratio a token carries.

A level takes LossInputs and gives the log-ratio `[T]`; the surrogate exponentiates it. Log-ratios of single tokens
are bounded to +-20 before anything else is done with them: e^20 is far outside every trust region, and float32
overflows at e^88. Outside the bound the gradient is 0.
"""

import torch.nn.functional as F
from torch import Tensor

from gruppo.loss.inputs import LossInputs

MAX_LOG_RATIO = 20.0


def token_level(inputs: LossInputs) -> Tensor:
    """r_t = exp(logp_t - old_t), each token its own"""
    # hardtanh is clamp with a one-pass backward
    return F.hardtanh(inputs.logps - inputs.old_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO, inplace=True)


def sequence_level(inputs: LossInputs) -> Tensor:
    """s = exp(mean_t(logp_t - old_t)), the geometric mean over the sequence

    GSPO, arXiv:2507.18071. The gradient reaches every token of the sequence through the mean.
    """
    segments = inputs.segments
    return segments.spread(segments.mean(token_level(inputs)))


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
    return segments.spread(segments.sum(token_level(inputs)).clamp(-18.420680743952367, MAX_LOG_RATIO))
