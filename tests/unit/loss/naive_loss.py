"""The losses once more, as slowly and plainly as they can be written: padded rows, one at a time, in float64.

Nothing is shared with the package. Formulas are those of the papers, in their textbook form: `exp(-d) - 1 + d` and not
`expm1`, `min(r*A, clip(r)*A)` and not its two halves, a quotient and not a weight per token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """Which loss: the four parts by name, and their numbers."""

    level: str = "token"
    surrogate: str = "clip"
    aggregate: str = "sequence_mean"
    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0
    tau: tuple[float, float] = (1.0, 1.0)
    max_completion_length: int = 1024
    beta: float = 0.0
    kl: int = 2
    entropy_coef: float = 0.0
    correction: tuple | None = None  # ("truncated", low, high) or ("masked", low, high, level)


NAMED = {
    "GRPO": Spec(),
    "GSPO": Spec(level="sequence"),
    "SAPO": Spec(surrogate="soft_gate"),
    "CISPO": Spec(surrogate="clipped_weight", aggregate="token_mean"),
    "BNPO": Spec(aggregate="local_token_mean"),
    "DRGRPO": Spec(aggregate="constant_length"),
    "DAPO": Spec(aggregate="token_mean", high=0.28),
}


@dataclass(frozen=True)
class Counts:
    sequences: int
    tokens: int
    local_tokens: int
    local_share: float = 1.0


def naive_loss(
    spec: Spec,
    mask: Tensor,  # [B, L] bool
    logps: Tensor,  # [B, L] float64, like all below
    old_logps: Tensor | None,
    ref_logps: Tensor,
    sampler_logps: Tensor,
    entropies: Tensor,
    advantages: Tensor,  # [B] or [B, L]
    counts: Counts | None = None,
) -> Tensor:
    if counts is None:
        counts = Counts(len(mask), int(mask.sum()), int(mask.sum()))
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mask.shape)
    total = logps.new_zeros(())
    for i, keep in enumerate(mask):
        n = int(keep.sum())
        if n == 0:
            continue
        logp, adv, ref, sampler = (x[i][keep] for x in (logps, advantages, ref_logps, sampler_logps))
        old = logp.detach() if old_logps is None else old_logps[i][keep]
        ratio = _ratio(spec, logp, old)
        policy = _surrogate(spec, ratio, adv, logp) * _correction(spec, old, sampler)
        penalty = _kl(spec.kl, (logp - ref).clamp(-40, 40), ratio)
        per_token = policy + spec.beta * penalty - spec.entropy_coef * entropies[i][keep]
        total = total + per_token.sum() / _denominator(spec, n, counts)
    return total


def _ratio(spec: Spec, logp: Tensor, old: Tensor) -> Tensor:
    gap = (logp - old).clamp(-20, 20)
    if spec.level == "token":
        return torch.exp(gap)
    if spec.level == "sequence":
        return torch.exp(gap.mean()).expand(len(gap))
    if spec.level == "sequence_token":
        return torch.exp(gap.mean()).detach() * torch.exp(logp) / torch.exp(logp).detach()
    assert spec.level == "sequence_sum"
    return torch.exp(gap.sum()).clamp(1e-8, torch.e**20).expand(len(gap))


def _surrogate(spec: Spec, ratio: Tensor, adv: Tensor, logp: Tensor) -> Tensor:
    clipped = torch.minimum(ratio * adv, ratio.clamp(1 - spec.low, 1 + spec.high) * adv)
    if spec.surrogate == "clip":
        return -clipped
    if spec.surrogate == "dual_clip":
        return -torch.where(adv < 0, torch.maximum(clipped, spec.cap * adv), clipped)
    if spec.surrogate == "clipped_weight":
        return -torch.clamp(ratio, max=1 + spec.high).detach() * adv * logp
    if spec.surrogate == "soft_gate":
        tau = torch.tensor([spec.tau[0] if a > 0 else spec.tau[1] for a in adv.tolist()], dtype=torch.float64)
        return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * adv
    if spec.surrogate == "policy_gradient":
        return -ratio * adv
    assert spec.surrogate == "gamma_weight"
    k, decay = (torch.where(adv < 0, b, a).double() for a, b in ((2, 3), (3, 2)))
    return -(torch.exp(decay) * ratio**k * torch.exp(-decay * ratio)).detach() * adv * logp


def _kl(number: int, delta: Tensor, ratio: Tensor) -> Tensor:
    return (delta, delta**2 / 2, torch.exp(-delta) - 1 + delta, ratio * delta)[number]


def _correction(spec: Spec, old: Tensor, sampler: Tensor) -> Tensor:
    gap = (old - sampler).clamp(-10, 10)
    match spec.correction:
        case None:
            return torch.ones_like(gap)
        case "truncated", low, high:
            return torch.exp(gap).clamp(low, high)
        case "masked", low, high, level:
            rho = torch.exp(gap if level == "token" else gap.mean().expand(len(gap)))
            return torch.tensor([x if low <= x <= high else 0.0 for x in rho.tolist()], dtype=torch.float64)


def _denominator(spec: Spec, length: int, counts: Counts) -> float:
    return {
        "sequence_mean": counts.sequences * length,
        "token_mean": counts.tokens,
        "local_token_mean": counts.local_tokens / counts.local_share,
        "constant_length": counts.sequences * spec.max_completion_length,
        "sequence_mean_token_sum": counts.sequences,
    }[spec.aggregate]


def named(name: str, **numbers) -> Spec:
    return replace(NAMED[name], **numbers)
