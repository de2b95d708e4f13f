"""Statistics and gradients of a chunk of logits in torch operations: the same numbers as `triton_chunk_ops`, anywhere.

`N` rows, `V` columns. `z = cap(scale * x) / temperature` are the logits that are exponentiated, where x is the product
of hidden states and weight and cap(y) = c * tanh(y / c) if there is a cap c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Values for log-probs and for entropies, `[N]` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShape:
    """Temperature, scale and soft cap that turn raw products into logits."""

    temperature: float = 1.0
    scale: float = 1.0
    soft_cap: float | None = None


def stats(x_NV: Tensor, labels_N: Tensor, shape: LogitShape, out_NV: Tensor | None = None) -> Pair:
    """Log-prob of the label and entropy of each row; and into `out` -d logp / d x, the direction of a row's gradient.

    The direction does not depend on the loss. Its sign is chosen so that it equals p everywhere except in the label's
    column, which saves a pass.
    """
    log_p_NV = _logits(x_NV, shape).log_softmax(-1)
    logps_N = log_p_NV.gather(-1, labels_N[:, None]).squeeze(-1)
    # p is written where the direction will stand, so that a chunk is passed over as seldom as possible
    fits = out_NV is not None and out_NV.dtype == log_p_NV.dtype
    p_NV = torch.exp(log_p_NV, out=out_NV if fits else None)
    entropy_N = -torch.linalg.vecdot(p_NV, log_p_NV)
    if out_NV is not None:
        d_NV = p_NV.scatter_add_(1, labels_N[:, None], torch.full_like(logps_N, -1)[:, None])
        slope_NV = _slope(x_NV, shape)
        if isinstance(slope_NV, Tensor) or slope_NV != 1:
            d_NV.mul_(slope_NV)
        if not fits:
            out_NV.copy_(d_NV)
    return logps_N, entropy_N


def gradient(x_NV: Tensor, labels_N: Tensor, numbers: Pair, grads: Pair, shape: LogitShape, out_NV: Tensor) -> None:
    """Into `out` d loss / d x, from `numbers`, the log-probs and entropies of `stats`, and `grads`, d loss / d each."""
    (_, entropy_N), (grad_logps_N, grad_entropy_N) = numbers, grads
    slope_NV = _slope(x_NV, shape)
    log_p_NV = _logits(x_NV, shape).log_softmax(-1)
    p_NV = log_p_NV.exp()
    # d logp / d z = onehot - p;   d entropy / d z = -p * (log p + entropy)
    d_NV = log_p_NV.nan_to_num_(neginf=0).add_(entropy_N[:, None]).mul_(-grad_entropy_N[:, None])
    d_NV = d_NV.sub_(grad_logps_N[:, None]).mul_(p_NV)
    d_NV.scatter_add_(1, labels_N[:, None], grad_logps_N[:, None])
    out_NV.copy_(d_NV.mul_(slope_NV))


def scale_rows(
    x_ND: Tensor, factor_N: Tensor, out_ND: Tensor, label_part: tuple[Tensor, Tensor, Tensor] | None = None
) -> None:
    """`out = x * factor[:, None]`; with `label_part` (residual, weight, labels), x first gains what rounding took from
    the label's column, whose entry is as large as the rest of the row combined."""
    if label_part is not None:
        residual_N, weight_VD, labels_N = label_part
        x_ND = x_ND + residual_N[:, None] * weight_VD[labels_N]
    out_ND.copy_(x_ND * factor_N[:, None])


def _logits(x_NV: Tensor, shape: LogitShape) -> Tensor:
    z_NV = x_NV
    if shape.scale != 1:
        z_NV = z_NV * shape.scale
    if shape.soft_cap is not None:
        z_NV = (z_NV / shape.soft_cap).tanh() * shape.soft_cap
    if shape.temperature != 1:
        z_NV = z_NV / shape.temperature
    return z_NV


def _slope(x_NV: Tensor, shape: LogitShape) -> Tensor | float:
    """d z / d x."""
    slope = shape.scale / shape.temperature
    if shape.soft_cap is None:
        return slope
    return (1 - (x_NV * (shape.scale / shape.soft_cap)).tanh().square()) * slope
