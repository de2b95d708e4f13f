"""The losses once more: padded rows, Python loops over tokens, float64, the papers' textbook forms.

Nothing is shared with the package. Log-probs are 0-d tensors so that autograd gives the gradient; everything else is a
Python number. `sg` is `.item()`: what a paper stops the gradient of is computed from plain numbers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """Which loss: the names of its parts, and their numbers."""

    level: str = "token_level"
    surrogate: str = "Clip"
    aggregate: str = "token_mean"
    correction: str = "none"
    select: str = "none"
    terms: str = "none"
    rejected: str = "counted"
    kl: str = "k3"
    beta: float = 0.0
    entropy_coef: float = 0.0
    pull: float = 0.0
    nll_coef: float = 0.0
    n: dict[str, Any] = field(default_factory=dict)  # numbers of the parts, by name


@dataclass(frozen=True)
class Counts:
    """What a step divides by, where the batch is only a part of it."""

    sequences: int
    tokens: int
    local_tokens: int
    local_share: float = 1.0


@dataclass
class Token:
    row: int
    rank: int  # which scored token of its row
    label: int
    logp: Tensor  # [] with gradient
    old: float
    sampler: float
    ref: float
    entropy: Tensor  # [] with gradient
    a: float
    d: Tensor | None = None  # log-ratio of the level
    c: float = 1.0
    policy: Tensor | None = None
    kept: bool = True


def clip(x, low, high):
    """min and max, whose gradient is that of the side that is taken."""
    return torch.clamp(x, low, high) if isinstance(x, Tensor) else min(max(x, low), high)


def oracle(
    f: Formula,
    labels: Tensor,  # [B, L]
    values: dict[str, Tensor],  # [B, L] float64; without old_logps the policy is the one that sampled
    advantages: Tensor,  # [B] or [B, L]
    counts: Counts | None = None,
) -> Tensor:
    rows = [[] for _ in labels]
    old_logps = values.get("old_logps", values["logps"])
    for i, row in enumerate(labels.tolist()):
        for j, label in enumerate(row):
            if label == -100:
                continue
            a = advantages[i] if advantages.dim() == 1 else advantages[i, j]
            rows[i].append(
                Token(
                    i,
                    len(rows[i]),
                    label,
                    values["logps"][i, j],
                    old_logps[i, j].item(),
                    values["sampler_logps"][i, j].item(),
                    values["ref_logps"][i, j].item(),
                    values["entropies"][i, j],
                    a.item(),
                )
            )
    tokens = [t for row in rows for t in row]
    for row in rows:
        set_correction(f, row)
        set_level(f, row)
    if f.correction == "Normalized":
        mean = sum(t.c for t in tokens) / len(tokens)
        for t in tokens:
            t.c /= mean
    for t in tokens:
        t.policy = surrogate(f, t)
    if f.terms == "CovariancePenalty":
        cov, count = covariances(tokens), share_of(f, tokens)
        for i in sorted(range(len(tokens)), key=lambda i: -cov[i])[:count]:
            tokens[i].policy = tokens[i].policy + f.n.get("coef", 1.0) * torch.abs(tokens[i].d)
    select(f, tokens)
    for t in tokens:
        t.policy = t.policy * t.c
        t.kept = t.kept and t.c != 0
    left = rows if f.rejected == "counted" else [[t for t in row if t.kept] for row in rows]
    num_sequences = sum(bool(now) or not before for before, now in zip(rows, left, strict=True))
    num_tokens = sum(len(row) for row in left)
    if counts is None:
        counts = Counts(num_sequences, num_tokens, num_tokens)
    total = 0.0 * values["logps"].sum()
    for row in left:
        for t in row:
            delta = clip(t.logp - t.ref, -40.0, 40.0)
            per_token = t.policy + f.beta * kl(f.kl, delta, torch.exp(t.d))
            per_token = per_token - f.entropy_coef * t.entropy + f.pull * t.d**2
            total = total + per_token / denominator(f, len(row), counts)
    positive = [t for t in tokens if t.a > 0]
    for t in positive:
        total = total - f.nll_coef * t.logp / len(positive)
    return total


def denominator(f: Formula, length: int, counts: Counts) -> float:
    return {
        "sequence_mean": counts.sequences * length,
        "token_mean": counts.tokens,
        "local_token_mean": counts.local_tokens / counts.local_share,
        "sequence_mean_token_sum": counts.sequences,
        "token_sum": 1,
        "ConstantLength": counts.sequences * f.n.get("max_completion_length", 1024),
    }[f.aggregate]


def set_correction(f: Formula, row: list[Token]) -> None:
    if not row:
        return
    logs = [clip(t.old - t.sampler, -10, 10) for t in row]
    mean, product = math.exp(sum(logs) / len(logs)), math.exp(clip(sum(logs), -10, 10))
    moved = sum(t.sampler - t.logp.item() for t in row) / len(row)
    low, high = f.n.get("rho", (0.5, 5.0))
    for t, log in zip(row, logs, strict=True):
        rho = math.exp(log)
        within = {
            "MaskedWeight": rho,
            "MaskedWeight sequence": mean,
            "MaskedWeight sequence_sum": product,
            "KeepWithin": rho,
        }.get(f.correction)
        if f.correction in ("TruncatedWeight", "Normalized"):
            t.c = clip(rho, f.n.get("low", 0.0), f.n.get("high", 2.0))
        elif f.correction == "TruncatedWeight sequence_sum":
            t.c = min(product, f.n.get("high", 2.0))
        elif f.correction == "KeepWithin":
            t.c = float(low <= rho <= high)
        elif within is not None:
            t.c = within if low <= within <= high else 0.0
        elif f.correction == "OffPolicySequenceMask":
            t.c = 0.0 if t.a < 0 and moved > f.n.get("opsm", 0.1) else 1.0
        elif f.correction == "two":
            t.c = min(rho, f.n.get("high", 2.0)) * (low <= mean <= high)


def set_level(f: Formula, row: list[Token]) -> None:
    if not row:
        return
    gaps = [clip(t.logp - t.old, -20.0, 20.0) for t in row]
    mean, product = sum(gaps) / len(gaps), sum(gaps)
    bottom = math.log(1e-8)
    low, high = f.n.get("log_clip", (0.4, 0.4))
    if f.level == "ClippedMean":
        # sign(A) * min(sign(A) d, sign(A) clip(d)), the paper's line
        signs = [1.0 if t.a > 0 else -1.0 for t in row]
        clipped = [s * torch.minimum(s * g, s * clip(g, -low, high)) for s, g in zip(signs, gaps, strict=True)]
        mean = sum(clipped) / len(clipped)
    if f.level == "CorrectedSum":
        product = product + sum(math.log(min(math.exp(clip(t.old - t.sampler, -10, 10)), 2.0)) for t in row)
    for t, gap in zip(row, gaps, strict=True):
        if f.level == "token_level":
            t.d = gap
        elif f.level == "sampler_level":
            t.d = clip(t.logp - t.sampler, -20.0, 20.0)
        elif f.level in ("sequence_level", "ClippedMean"):
            t.d = mean
        elif f.level == "sequence_token_level":
            t.d = mean.item() + t.logp - t.logp.item()
        else:
            assert f.level in ("sequence_sum_level", "CorrectedSum")
            t.d = clip(product, bottom, 20.0)


def surrogate(f: Formula, t: Token) -> Tensor:
    low, high = f.n.get("clip", (0.2, 0.2))
    r = torch.exp(t.d)
    clipped = torch.minimum(r * t.a, clip(r, 1 - low, 1 + high) * t.a)
    if f.surrogate == "Clip":
        return -clipped
    if f.surrogate == "DualClip":
        # the two-sided form: min(min(r, cap) A, clip(r) A)
        return -torch.minimum(torch.clamp(r, max=f.n.get("cap", 3.0)) * t.a, clip(r, 1 - low, 1 + high) * t.a)
    if f.surrogate == "ClippedWeight":
        return -min(r.item(), f.n.get("weight_cap", 1.2)) * t.a * t.logp
    if f.surrogate == "SoftGate":
        positive, negative = f.n.get("tau", (1.0, 1.0))
        tau = positive if t.a > 0 else negative
        return -(4 / tau) / (1 + torch.exp(-tau * (r - 1))) * t.a
    if f.surrogate == "PolicyGradient":
        return -r * t.a
    if f.surrogate == "LogProb":
        return -t.a * t.logp
    assert f.surrogate == "GammaWeight"
    k, decay = (2, 3) if t.a >= 0 else (3, 2)
    w = r.item()
    return -math.exp(decay) * w**k * math.exp(-decay * w) * t.a * t.logp


def kl(name: str, delta: Tensor, ratio: Tensor) -> Tensor:
    k3 = torch.exp(-delta) - 1 + delta
    if name == "k3_straight_through":
        return k3.item() + delta.item() * (delta - delta.item())  # value of k3, slope of delta^2 / 2
    return {
        "k1": delta,
        "k2": delta**2 / 2,
        "k3": k3,
        "abs_kl": torch.abs(delta),
        "ratio_k1": ratio * delta,
        "ratio_k3": ratio * k3,
    }[name]


def select(f: Formula, tokens: list[Token]) -> None:
    """Sets `kept`, and the policy loss of what is not kept to 0."""
    outward = [t.a * t.d.item() > 0 for t in tokens]
    if f.select == "TopEntropy":
        entropies = torch.stack([t.entropy for t in tokens]).detach()
        threshold = torch.quantile(entropies, 1 - f.n.get("share", 0.2))  # linear interpolation
        keep = [t.entropy.item() >= threshold.item() - 1e-12 for t in tokens]
    elif f.select == "ClipCovariance":
        cov, count = covariances(tokens), share_of(f, tokens)
        low, high = f.n.get("cov", (1.0, 5.0))
        clip_low, clip_high = f.n.get("clip", (0.2, 0.2))
        candidates = []
        for i, t in enumerate(tokens):
            r = math.exp(t.d.item())
            is_clipped = (t.a > 0 and r > 1 + clip_high) or (t.a < 0 and r < 1 - clip_low)
            if low < cov[i] < high and not is_clipped:
                candidates.append(i)
        candidates.sort(key=lambda i: draw(tokens[i], f.n.get("seed", 0)))
        keep = [i not in candidates[:count] for i in range(len(tokens))]
    elif f.select == "SecondMoment":
        judged = sorted((i for i, is_out in enumerate(outward) if is_out), key=lambda i: -(tokens[i].d.item() ** 2))
        dropped = set()
        for i in judged:  # the largest first, until the mean of what is left is small enough
            left = [tokens[j].d.item() ** 2 for j in judged if j not in dropped]
            if sum(left) / len(left) <= f.n.get("moment", 0.04):
                break
            dropped.add(i)
        keep = [i not in dropped for i in range(len(tokens))]
    elif f.select == "VariationBudget":
        gaps = [clip(t.logp.item() - t.old, -20, 20) for t in tokens]
        variation = sum(abs(math.exp(g) - 1) for g in gaps) / len(tokens)
        keep = [variation <= f.n.get("budget", 0.1) or t.a * g <= 0 for t, g in zip(tokens, gaps, strict=True)]
    elif f.select == "none":
        return
    else:
        keep = [keeps(f, t) for t in tokens]
    for t, k in zip(tokens, keep, strict=True):
        t.kept = k
        t.policy = t.policy * float(k)


def covariances(tokens: list[Token]) -> list[float]:
    mean_a, mean_logp = (sum(x) / len(tokens) for x in ([t.a for t in tokens], [t.logp.item() for t in tokens]))
    return [(t.a - mean_a) * (t.logp.item() - mean_logp) for t in tokens]


def share_of(f: Formula, tokens: list[Token]) -> int:
    return max(int(f.n.get("share", 0.2) * len(tokens)), 1)


def keeps(f: Formula, t: Token) -> bool:
    p, base_logp = math.exp(t.logp.item()), t.sampler if f.n.get("base") == "sampler" else t.old
    base = math.exp(base_logp)
    if f.select == "TVRegion":
        low, high = f.n.get("region", (0.2, 0.2))
        return p - base <= high if t.a > 0 else p - base >= -low
    if f.select == "ProbabilityBand":
        return abs(p - base) <= f.n.get("band", 0.1)
    assert f.select == "KLRegion"
    low, high = f.n.get("region", (0.05, 0.05))
    divergence = base * math.log(base / p) + (1 - base) * math.log((1 - base + 1e-8) / (1 - p + 1e-8))
    return divergence <= high or p <= base if t.a > 0 else divergence <= low or p >= base


M64 = 2**64 - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def draw(t: Token, seed: int) -> int:
    """SplitMix64 in Python's integers of the row, the rank in it, the label and the seed."""
    golden = 0x9E3779B97F4A7C15
    place = mix(mix((t.row + golden) & M64) ^ (t.rank * golden & M64))
    return mix(place ^ mix(t.label + (seed + 1) * 0x5851F42D4C957F2D % 2**62))
