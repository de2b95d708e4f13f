"""Log-probs from few logits: all of them at once, with the probabilities kept for the backward."""

import torch
from torch import Tensor

from gruppo.kernel.reference import at_least_float32


def dense_logps_and_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The numbers and gradients of `reference.linear_logps_and_entropy`, all tokens scored, in half the passes."""
    return _Dense.apply(hidden_ND, weight_VD, labels_N, temperature)  # type: ignore[return-value]


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, temperature):
        ctx.set_materialize_grads(False)  # without an entropy bonus no gradient comes back to the entropies
        hidden_ND, weight_VD = at_least_float32(hidden_ND), at_least_float32(weight_VD)
        z = hidden_ND @ weight_VD.T
        if temperature != 1:
            z /= temperature
        log_p = z.log_softmax(-1)
        logps_N = log_p.gather(-1, labels_N[:, None]).squeeze(-1)
        p = torch.exp(log_p, out=z)
        log_p.clamp_(min=torch.finfo(log_p.dtype).min)  # 0 * log 0 counts 0
        entropy_N = -torch.bmm(p[:, None], log_p[..., None]).view(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, p, entropy_N)
        ctx.temperature = temperature
        return logps_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logps_N, grad_entropy_N):  # type: ignore[override]
        hidden_ND, weight_VD, labels_N, p, entropy_N = ctx.saved_tensors
        d_z = torch.zeros_like(p)
        if grad_logps_N is not None:
            torch.mul(p, -grad_logps_N[:, None], out=d_z)
            d_z.scatter_add_(1, labels_N[:, None], grad_logps_N[:, None])
        if grad_entropy_N is not None:
            d_z -= grad_entropy_N[:, None] * (torch.xlogy(p, p) + p * entropy_N[:, None])
        if ctx.temperature != 1:
            d_z /= ctx.temperature
        grad_hidden = d_z @ weight_VD if ctx.needs_input_grad[0] else None
        grad_weight = d_z.T @ hidden_ND if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None
