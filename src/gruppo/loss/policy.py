"""PolicyLoss: puts level, surrogate, KL, aggregation, correction and selection together."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from gruppo.batch.segments import Segments
from gruppo.batch.totals import Totals
from gruppo.errors import InputError
from gruppo.loss.aggregate import sequence_mean
from gruppo.loss.composition import check_composition, formula
from gruppo.loss.inputs import LossInputs, PerToken, align
from gruppo.loss.kl import MAX_DELTA, KLEstimator, k3
from gruppo.loss.level import token_level
from gruppo.loss.part import fact
from gruppo.loss.surrogate import Clip
from gruppo.loss.survey import rejected_tokens, surveyed, token_weights

Level = Callable[[LossInputs], Tensor]
Surrogate = Callable[[Tensor, LossInputs], Tensor]
Aggregate = Callable[[Segments, Totals], Tensor]
Correction = Callable[[LossInputs], Tensor]
Select = Callable[[Tensor, Tensor, LossInputs], Tensor]
Rejected = Literal["counted", "left_out"]
COEFFICIENTS = ("beta", "entropy_coef", "pull", "nll_coef")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss and what it is made of."""

    loss: Tensor  # [] with gradient
    terms: dict[str, Tensor]
    """The aggregated `policy`, `kl`, `entropy`, `pull` and `nll` before their coefficients, without gradient."""
    on_policy: bool
    """True when no `old_logps` were given, so that every ratio was 1 by definition."""
    rejected: Tensor | None = None  # [] int64
    """How many scored tokens with an advantage other than 0 the correction or the selection left out; None for a loss
    that has neither."""


class PolicyLoss:
    """`loss = sum_t weight_t * (select(surrogate_t) * correction_t + beta * kl_t - entropy_coef * entropy_t + ...)`

    Args:
        level: whose log-ratio a token carries (`gruppo.loss.level`).
        surrogate: what is done with ratio and advantage (`gruppo.loss.surrogate`).
        kl: penalty towards the reference (`gruppo.loss.kl`); used when beta is not 0.
        aggregate: the weight of a token (`gruppo.loss.aggregate`).
        correction: weight for the sampler/trainer gap (`gruppo.loss.correction`), or None.
        select: which tokens the policy term acts on (`gruppo.loss.select`, `gruppo.loss.trust_region`), or None.
        rejected: tokens that the correction or the selection drops stay "counted" in the means, or are "left_out" of
            the loss altogether: of the means, of the KL and of the entropy bonus too.
        beta: coefficient of the KL penalty.
        entropy_coef: coefficient of the entropy bonus.
        pull: coefficient of (log r)^2, which pulls the policy back to the one its ratio is over.
        nll_coef: coefficient of the mean of -logp over the tokens with A > 0.
    """

    clip_range: tuple[float, float] | None = None
    """(low, high): the band outside which metrics count a ratio as clipped. None: it clips nothing."""
    _is_made = False

    def __init__(
        self,
        *,
        level: Level = token_level,
        surrogate: Surrogate = Clip(),  # noqa: B008  a frozen value
        kl: KLEstimator = k3,
        aggregate: Aggregate = sequence_mean,
        correction: Correction | None = None,
        select: Select | None = None,
        rejected: Rejected = "counted",
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        pull: float = 0.0,
        nll_coef: float = 0.0,
    ) -> None:
        self.level = level
        self.surrogate = surrogate
        self.kl = kl
        self.aggregate = aggregate
        self.correction = correction
        self.select = select
        self.rejected = rejected
        self.beta = beta
        self.entropy_coef = entropy_coef
        self.pull = pull
        self.nll_coef = nll_coef
        check_composition(self)
        if self.clip_range is None and isinstance(getattr(surrogate, "high", None), float | int):
            high: float = surrogate.high  # type: ignore[attr-defined]  # just seen
            self.clip_range = (getattr(surrogate, "low", high), high)
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made:
            raise AttributeError(
                f"a loss does not change once it is made: {name} is fixed. Make another, or use "
                "loss.replace(...) for a coefficient"
            )
        super().__setattr__(name, value)

    def replace(self, **coefficients: float) -> Self:
        """The same loss with other coefficients: `beta`, `entropy_coef`, `pull` or `nll_coef`."""
        for name in coefficients:
            if name not in COEFFICIENTS:
                raise InputError(f"replace takes {', '.join(COEFFICIENTS)}, got {name!r}; make another loss for a part")
        other = copy.copy(self)
        for name, value in coefficients.items():
            object.__setattr__(other, name, value)
        check_composition(other)
        return other

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that make the loss of a token."""
        made = (self.level, self.surrogate, self.correction, self.select, self.kl if self.beta else None)
        return tuple(part for part in made if part is not None)

    @property
    def is_per_token(self) -> bool:
        """Does a token's loss depend on that token alone (and on the step's totals)? Unknown parts may look further."""
        return self.rejected == "counted" and all(fact(part, "is_per_token") for part in self.parts)

    @property
    def is_zero_without_advantage(self) -> bool:
        """Is the gradient of a sequence exactly 0 when its advantage is? Surrogate and selection say so themselves."""
        judged = (self.surrogate,) if self.select is None else (self.surrogate, self.select)
        no_other_term = self.beta == 0 and self.entropy_coef == 0 and self.pull == 0
        return no_other_term and all(fact(part, "is_zero_without_advantage") for part in judged)

    @property
    def rejects(self) -> bool:
        """Can its correction or selection leave tokens out of the policy term?"""
        return self.correction is not None or hasattr(self.select, "keep")

    @property
    def reads_sampler(self) -> bool:
        """Does it deal with the sampler's log-probs, as a correction or in its ratio?"""
        return "sampler_logps" in self.needs

    @property
    def draws_tokens(self) -> bool:
        """Must it know the place of each token in the step?"""
        return any(fact(part, "draws_tokens") for part in self.parts)

    @property
    def surveys_policy(self) -> bool:
        """Must the log-probs of the whole step be known before its first backward?"""
        rejects = self.rejected == "left_out" and (self.correction is not None or self.select is not None)
        return rejects or any(hasattr(part, "survey") for part in self.parts)

    @property
    def surveys(self) -> bool:
        """Must something be counted over the whole step before its first backward, besides sequences and tokens?"""
        return self.surveys_policy or self.nll_coef != 0

    @property
    def needs(self) -> frozenset[str]:
        """The optional inputs that this loss cannot do without."""
        wanted = {"ref_logps": self.beta != 0, "entropies": self.entropy_coef != 0}
        own = frozenset(name for name, is_wanted in wanted.items() if is_wanted)
        if self.correction is not None and not hasattr(self.correction, "needs"):
            own |= {"sampler_logps"}  # a function of the user's: what else would it correct with?
        return own.union(*(fact(part, "needs") for part in self.parts))

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
        aligned = self.align(
            inputs,
            outputs,
            advantages=advantages,
            old_logps=old_logps,
            ref_logps=ref_logps,
            sampler_logps=sampler_logps,
            totals=totals,
        )
        if advantages is None:
            return LossOutput(loss=aligned.logps[:0].sum(), terms={}, on_policy=aligned.on_policy)
        if totals is None and self.surveys:
            aligned = surveyed(self, aligned)
        return self.compute(aligned)

    def align(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        ref_logps: PerToken | None = None,
        sampler_logps: PerToken | None = None,
        **others: Any,
    ) -> LossInputs:
        """The arguments of a call in their one inner form, without what this loss does not read."""
        return align(
            inputs,
            outputs,
            ref_logps=ref_logps if self.beta else None,
            sampler_logps=sampler_logps if "sampler_logps" in self.needs else None,
            with_places=self.draws_tokens,
            **others,
        )

    def survey(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        advantages: Tensor | Sequence[float] | PerToken,
        old_logps: PerToken | None = None,
        sampler_logps: PerToken | None = None,
        totals: Totals | None = None,
    ) -> Totals:
        """The totals of a whole step, with what the parts must know of it. Arguments as for a call, over all sequences.

        Counted without gradient, before the first micro-batch; then each micro-batch is called with these totals and
        gives its share of the same loss. `totals` are those to add to, when they are known already.
        """
        aligned = self.align(
            inputs, outputs, advantages=advantages, old_logps=old_logps, sampler_logps=sampler_logps, totals=None
        )
        known = aligned.totals if totals is None else totals
        return surveyed(self, replace(aligned, totals=known)).totals if self.surveys else known

    def surveyed(self, inputs: LossInputs) -> LossInputs:
        """The inputs of a whole step, whose totals hold what the parts must know of it."""
        return surveyed(self, inputs) if self.surveys else inputs

    def compute(self, inputs: LossInputs) -> LossOutput:
        """The loss of aligned inputs."""
        self.check_needs(inputs)
        log_ratio_T = self.level(inputs)
        policy_T = self.surrogate(log_ratio_T, inputs)
        if self.select is not None:
            policy_T = self.select(policy_T, log_ratio_T, inputs)
        correction_T = None if self.correction is None else self.correction(inputs)
        if correction_T is not None:
            policy_T = policy_T * correction_T
        weight_T = token_weights(self, inputs, log_ratio_T, correction_T)
        loss = torch.dot(weight_T, policy_T)
        terms = {"policy": loss.detach()}
        rejected = rejected_tokens(self, inputs, log_ratio_T, correction_T) if self.rejects else None
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
        if self.pull:
            pull = torch.dot(weight_T, log_ratio_T.square())
            terms["pull"] = pull.detach()
            loss = loss + self.pull * pull
        if self.nll_coef:
            positive_T = (inputs.advantages > 0).to(inputs.logps.dtype)
            count = inputs.totals.number("positive_tokens").clamp(min=1).to(inputs.logps.dtype)
            nll = -torch.dot(positive_T, inputs.logps) / count
            terms["nll"] = nll.detach()
            loss = loss + self.nll_coef * nll
        return LossOutput(loss=loss, terms=terms, on_policy=inputs.on_policy, rejected=rejected)

    def check_needs(self, inputs: LossInputs, besides: frozenset[str] = frozenset()) -> None:
        """Refuse inputs without what this loss cannot do without."""
        missing = sorted(name for name in self.needs - besides if getattr(inputs, name) is None)
        if missing:
            made = f"{type(self).__name__}(beta={self.beta:g}, entropy_coef={self.entropy_coef:g})"
            raise InputError(f"{made} needs {missing[0]}, got None. {_REMEDY[missing[0]]}")

    def __repr__(self) -> str:
        return formula(self)


_REMEDY = {
    "ref_logps": "Pass the reference policy's log-probs, or set beta=0.",
    "entropies": "Put `entropies` into outputs, or set entropy_coef=0 and leave out a selection by entropy.",
    "sampler_logps": "Pass the sampler's log-probs, or leave out the correction (selection, level) that reads them.",
}
