"""Hidden states -> log-probs and entropies in chunks of tokens: no [T, V] tensor is ever held.

Only scored tokens reach the head. The backward forms each chunk's logits again rather than keep them, so the peak
is one chunk of float32 logits whatever the number of tokens.
"""

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.kernel.reference import at_least_float32, check_head, check_temperature

LOGITS_PER_CHUNK = 1 << 25
"""Float32 logits held at a time: 128 MiB."""


def chunked_linear_logps_and_entropy(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    labels: Tensor,  # [...] int64, -100 is not scored
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The numbers and gradients of `reference.linear_logps_and_entropy`, one chunk of tokens at a time."""
    check_head(hidden, weight, labels)
    check_temperature(temperature)
    scored = (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])[scored]
    logps_N, entropy_N = _ChunkedHead.apply(hidden_ND, weight, labels.reshape(-1)[scored], temperature)  # type: ignore[misc]
    return _scatter(logps_N, scored, labels), _scatter(entropy_N, scored, labels)


def _scatter(values_N: Tensor, scored: Tensor, labels: Tensor) -> Tensor:
    return values_N.new_zeros(labels.numel()).index_put((scored,), values_N).view(labels.shape)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, temperature):
        dtype = at_least_float32(hidden_ND[:0]).dtype
        logps_N = torch.empty(len(labels_N), dtype=dtype, device=hidden_ND.device)
        entropy_N = torch.empty_like(logps_N)
        weight_DV = weight_VD.to(dtype).T
        for rows in _chunks(len(labels_N), weight_VD.shape[0]):
            z = hidden_ND[rows].to(dtype) @ weight_DV
            z /= temperature
            z = z.log_softmax(-1)  # log p; the name frees the logits
            logps_N[rows] = z.gather(-1, labels_N[rows, None]).squeeze(-1)
            entropy_N[rows] = -z.exp().mul_(z).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, entropy_N)
        ctx.temperature = temperature
        return logps_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logps_N, grad_entropy_N):  # type: ignore[override]
        hidden_ND, weight_VD, labels_N, entropy_N = ctx.saved_tensors
        dtype = entropy_N.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros(weight_VD.shape, dtype=dtype, device=weight_VD.device) if needs_weight else None
        head_VD = weight_VD.to(dtype)
        for rows in _chunks(len(labels_N), len(weight_VD)):
            h = hidden_ND[rows].to(dtype)
            z = h @ head_VD.T
            z /= ctx.temperature
            z = z.log_softmax(-1)  # log p
            p = z.exp()
            # d logp / d z = onehot - p;   d entropy / d z = -p * (log p + entropy)
            d_z = z.add_(entropy_N[rows, None]).mul_(-grad_entropy_N[rows, None]).sub_(grad_logps_N[rows, None])
            d_z.mul_(p)
            d_z.scatter_add_(1, labels_N[rows, None], grad_logps_N[rows, None])
            d_z /= ctx.temperature
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = (d_z @ head_VD).to(hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(d_z.T, h)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None


def _chunks(num_rows: int, vocabulary: int):
    size = max(1, LOGITS_PER_CHUNK // max(vocabulary, 1))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
