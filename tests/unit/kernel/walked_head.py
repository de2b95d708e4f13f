"""The head as an autograd function, so that tests can compare it with the reference under any loss."""

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.head import Head
from gruppo.kernel.logps import check_head, check_temperature


def walked_logps_and_entropy(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    labels: Tensor,  # [...] int64, -100 is not scored
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The numbers and gradients of `reference.linear_logps_and_entropy`, one window of tokens at a time, for autograd.

    The backward forms the logits again, since the loss is not known in the forward.
    """
    check_head(hidden, weight, labels)
    check_temperature(temperature)
    scored = (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])[scored]
    logps_N, entropy_N = _WalkedHead.apply(hidden_ND, weight, labels.reshape(-1)[scored], temperature)  # type: ignore[misc]
    return _scatter(logps_N, scored, labels), _scatter(entropy_N, scored, labels)


class _WalkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, temperature):
        ctx.head = Head(weight_VD.detach(), shape=LogitShape(temperature=temperature))
        ctx.save_for_backward(hidden_ND, labels_N)
        ctx.weight_dtype = weight_VD.dtype
        return ctx.head.score(hidden_ND, labels_N)

    @staticmethod
    def backward(ctx, grad_logps_N, grad_entropy_N):  # type: ignore[override]
        hidden_ND, labels_N = ctx.saved_tensors
        result = ctx.head.train(
            hidden_ND,
            labels_N,
            lambda rows, _logps, _entropies: (grad_logps_N[rows], grad_entropy_N[rows]),
            needs_weight=ctx.needs_input_grad[1],
            entropy_gradient=True,
        )
        d_weight = None if result.d_weight is None else result.d_weight.to(ctx.weight_dtype)
        return result.d_hidden, d_weight, None, None


def _scatter(values_N: Tensor, scored: Tensor, labels: Tensor) -> Tensor:
    return values_N.new_zeros(labels.numel()).index_put((scored,), values_N).view(labels.shape)
