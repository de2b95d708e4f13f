"""Log-probs and entropies from full logits: in a few plain lines, the reference for every kernel, and with a custom
backward.

Everything is computed in float32 at least (float64 in, float64 out): bf16 logits move a log-prob by about 1e-2,
which is as much as several policy updates.
"""

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError


def logps_and_entropy(
    logits: Tensor,  # [..., V]
    labels: Tensor,  # [...] int64, -100 is not scored
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution at `temperature`; both 0 where not scored.

        logp_t = log p_t[label],   entropy_t = -sum_v p_tv * log p_tv,   log p = log_softmax(logits / temperature)

    >>> logps_and_entropy(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), torch.tensor([1, -100]))
    (tensor([-0.6931,  0.0000]), tensor([0.6931, 0.0000]))
    """
    check_temperature(temperature)
    scored = labels != IGNORE_INDEX
    # Where nothing is scored the logits may be anything, even NaN: replace them before the first exp.
    z = torch.where(scored[..., None], at_least_float32(logits), 0) / temperature
    # log_softmax and not z - logsumexp: it takes the maximum off first, so large logits lose no digits.
    log_p = z.log_softmax(-1)
    logps = log_p.gather(-1, torch.where(scored, labels, 0)[..., None]).squeeze(-1)
    # A logit of -inf has p = 0 and log p = -inf, and 0 * log 0 counts 0.
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    return torch.where(scored, logps, 0), torch.where(scored, entropy, 0)


def linear_logps_and_entropy(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    labels: Tensor,  # [...] int64, -100 is not scored
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`logps_and_entropy` of `hidden @ weight.T`, the product taken in float32 at least."""
    check_head(hidden, weight, labels)
    # Before the product: NaN times a gradient of 0 would still reach the gradient of the weight.
    hidden = torch.where((labels != IGNORE_INDEX)[..., None], hidden, 0)
    return logps_and_entropy(at_least_float32(hidden) @ at_least_float32(weight).T, labels, temperature)


def dense_logps_and_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The numbers and gradients of `linear_logps_and_entropy`, all tokens scored, in half the passes."""
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


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def check_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise InputError(
            f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}; expected one vector per label"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise InputError(f"weight must be [V, {hidden.shape[-1]}], got {tuple(weight.shape)}")


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InputError(f"temperature must be positive, got {temperature!r}")
