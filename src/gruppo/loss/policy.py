"""PolicyLoss: puts level, surrogate, KL, aggregation and correction together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gruppo.batch.segments import Segments
from gruppo.batch.totals import Totals
from gruppo.errors import InputError
from gruppo.loss.aggregate import sequence_mean
from gruppo.loss.inputs import LossInputs, PerToken, align
from gruppo.loss.kl import MAX_DELTA, KLEstimator, k1, k2, k3, ratio_k1, ratio_k3
from gruppo.loss.level import token_level
from gruppo.loss.surrogate import Clip

PER_TOKEN_FUNCTIONS = (token_level, k1, k2, k3, ratio_k1, ratio_k3)

Level = Callable[[LossInputs], Tensor]
Surrogate = Callable[[Tensor, LossInputs], Tensor]
Aggregate = Callable[[Segments, Totals], Tensor]
Correction = Callable[[LossInputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss and what it is made of."""

    loss: Tensor  # [] with gradient
    terms: dict[str, Tensor]
    """The aggregated `policy`, `kl` and `entropy` before their coefficients, without gradient."""
    on_policy: bool
    """True when no `old_logps` were given, so that every ratio was 1 by definition."""


class PolicyLoss:
    """`loss = sum_t weight_t * (surrogate_t * correction_t + beta * kl_t - entropy_coef * entropy_t)`

    Args:
        level: whose log-ratio a token carries (`gruppo.loss.level`).
        surrogate: what is done with ratio and advantage (`gruppo.loss.surrogate`).
        kl: penalty towards the reference (`gruppo.loss.kl`); used when beta is not 0.
        aggregate: the weight of a token (`gruppo.loss.aggregate`).
        correction: weight for the sampler/trainer gap (`gruppo.loss.correction`), or None.
        beta: coefficient of the KL penalty.
        entropy_coef: coefficient of the entropy bonus.
    """

    clip_range: tuple[float, float] | None = None
    """(low, high): the band outside which metrics count a ratio as clipped. Named losses set it."""

    def __init__(
        self,
        *,
        level: Level = token_level,
        surrogate: Surrogate = Clip(),  # noqa: B008  a frozen value
        kl: KLEstimator = k3,
        aggregate: Aggregate = sequence_mean,
        correction: Correction | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
    ) -> None:
        for name, part in (("level", level), ("surrogate", surrogate), ("kl", kl), ("aggregate", aggregate)):
            if not callable(part):
                raise InputError(f"{name} must be a function or a part of gruppo.loss, got {part!r}")
        if correction is not None and not callable(correction):
            raise InputError(f"correction must be a function or a part of gruppo.loss, got {correction!r}")
        for name, value, lowest in (("beta", beta, 0.0), ("entropy_coef", entropy_coef, -math.inf)):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < lowest
            ):
                raise InputError(
                    f"{name} must be a finite number{' of at least 0' if lowest == 0 else ''}, got {value!r}"
                )
        self.level = level
        self.surrogate = surrogate
        self.kl = kl
        self.aggregate = aggregate
        self.correction = correction
        self.beta = beta
        self.entropy_coef = entropy_coef
        if self.clip_range is None and isinstance(getattr(surrogate, "high", None), float | int):
            high: float = surrogate.high  # type: ignore[attr-defined]  # just seen
            self.clip_range = (getattr(surrogate, "low", high), high)

    @property
    def is_per_token(self) -> bool:
        """Does a token's loss depend on that token alone? Unknown parts may look at the whole sequence."""
        parts = (self.level, self.surrogate, self.kl, self.correction)
        return all(part is None or getattr(part, "is_per_token", part in PER_TOKEN_FUNCTIONS) for part in parts)

    @property
    def is_zero_without_advantage(self) -> bool:
        """Is the gradient of a sequence exactly 0 when its advantage is? Known surrogates are proportional to it."""
        return self.beta == 0 and self.entropy_coef == 0 and getattr(self.surrogate, "is_per_token", False)

    @property
    def needs(self) -> frozenset[str]:
        """The optional inputs that this loss cannot do without."""
        wanted = {
            "ref_logps": self.beta != 0,
            "entropies": self.entropy_coef != 0,
            "sampler_logps": self.correction is not None,
        }
        return frozenset(name for name, is_wanted in wanted.items() if is_wanted)

    def __call__(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        advantages: Tensor | Sequence[float] | PerToken | None,
        old_logps: PerToken | None = None,
        ref_logps: PerToken | None = None,
        sampler_logps: PerToken | None = None,
        totals: Totals | None = None,
    ) -> LossOutput:
        """The loss of a batch, or of one micro-batch of a step whose `totals` are given.

        Args:
            inputs: `labels`, padded `[B, L]` or packed `[T]`/`[1, T]` with `position_ids` or `cu_seqlens`;
                `labels[t]` is the token scored at slot t, -100 is not scored.
            outputs: `logps` in the labels' shape, or `logits`; optionally `entropies`.
            advantages: one per sequence, or one per token. None: nothing to learn from, the loss is exactly 0.
            old_logps: log-probs under the policy that sampled; None means on-policy, ratio 1.
            ref_logps: log-probs under the reference policy.
            sampler_logps: the sampler's own log-probs, for a correction.
            totals: what the whole step divides by; None when this call is the whole step.

        Per-token inputs have the labels' shape, or are one list per sequence with one value per scored token.
        """
        aligned = align(
            inputs,
            outputs,
            advantages=advantages,
            old_logps=old_logps,
            ref_logps=ref_logps if self.beta else None,
            sampler_logps=sampler_logps if self.correction else None,
            totals=totals,
        )
        if advantages is None:
            return LossOutput(loss=aligned.logps[:0].sum(), terms={}, on_policy=aligned.on_policy)
        return self.compute(aligned)

    def compute(self, inputs: LossInputs) -> LossOutput:
        """The loss of aligned inputs."""
        missing = sorted(name for name in self.needs if getattr(inputs, name) is None)
        if missing:
            raise InputError(
                f"{type(self).__name__}({self._coefficients()}) needs {missing[0]}, got None. {_REMEDY[missing[0]]}"
            )
        segments = inputs.segments
        weight_S = self.aggregate(segments, inputs.totals).to(inputs.logps.dtype)
        weight_T = segments.keep_(segments.spread(weight_S))
        log_ratio_T = self.level(inputs)
        policy_T = self.surrogate(log_ratio_T, inputs)
        if self.correction is not None:
            policy_T = policy_T * self.correction(inputs)
        loss = torch.dot(weight_T, policy_T)
        terms = {"policy": loss.detach()}
        if self.beta:
            assert inputs.ref_logps is not None
            delta_T = (inputs.logps - inputs.ref_logps).clamp(-MAX_DELTA, MAX_DELTA)
            kl = torch.dot(weight_T, self.kl(delta_T, log_ratio_T))
            terms["kl"] = kl.detach()
            loss = loss + self.beta * kl
        if self.entropy_coef:
            assert inputs.entropies is not None
            entropy = torch.dot(weight_T, inputs.entropies)
            terms["entropy"] = entropy.detach()
            loss = loss - self.entropy_coef * entropy
        return LossOutput(loss=loss, terms=terms, on_policy=inputs.on_policy)

    def _coefficients(self) -> str:
        return f"beta={self.beta:g}, entropy_coef={self.entropy_coef:g}"

    def __repr__(self) -> str:
        total = "surrogate_t" + (" * correction_t" if self.correction else "")
        total += f" + {self.beta:g} * kl_t" if self.beta else ""
        total += f" - {self.entropy_coef:g} * entropy_t" if self.entropy_coef else ""
        lines = [f"{type(self).__name__}: loss = sum_t weight_t * ({total})"]
        lines.append(f"  level       {describe(self.level)}")
        lines.append(f"  surrogate   {describe(self.surrogate)}")
        if self.correction:
            lines.append(f"  correction  {describe(self.correction)}")
        if self.beta:
            lines.append(f"  kl          {describe(self.kl)}, delta = logp - ref")
        lines.append(f"  weight      {describe(self.aggregate)}")
        return "\n".join(lines)


_REMEDY = {
    "ref_logps": "Pass the reference policy's log-probs, or set beta=0.",
    "entropies": "Put `entropies` into outputs, or set entropy_coef=0.",
    "sampler_logps": "Pass the sampler's log-probs, or leave out the correction.",
}


def describe(part: Any) -> str:
    """A part in words: what it says of itself, or the first line of its docstring."""
    if type(part).__str__ is not object.__str__ and not isinstance(part, type):
        return str(part)
    documentation = (getattr(part, "__doc__", None) or "").strip()
    return documentation.splitlines()[0] if documentation else getattr(part, "__name__", repr(part))
