"""PolicyLoss: a loss composed of level, surrogate, token weights, terms and aggregation."""

import copy
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from gruppo.batch.packed import Totals
from gruppo.batch.segments import Segments
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs, PerToken, align
from gruppo.loss.parts import Clip, describe, local_token_mean, sequence_mean, token_level, token_mean, trait
from gruppo.loss.terms import KLEstimator, PositiveNLL, ReferenceKL, Term, entropy, k3, squared_log_ratio
from gruppo.loss.weights import TokenWeight, as_tuple, is_correction, takes_log_ratio

__all__ = ["LossOutput", "PolicyLoss"]

Level = Callable[[LossInputs], Tensor]
Surrogate = Callable[[Tensor, LossInputs], Tensor]
Aggregate = Callable[[Segments, Totals], Tensor]
Rejected = Literal["counted", "left_out"]
Weights = TokenWeight | tuple[TokenWeight, ...] | None

COEFFICIENTS = {"beta": ("kl", 1), "entropy_coef": ("entropy", -1), "pull": ("pull", 1), "nll_coef": ("nll", 1)}
"""Keywords that set a coefficient, with their term and sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Value of a loss, and its terms."""

    loss: Tensor  # [] with gradient
    terms: dict[str, Tensor]
    """The aggregated `policy`, `kl`, `entropy`, `pull` and `nll` before their coefficients, without gradient."""
    on_policy: bool
    """True when no `old_logps` were given, so that every ratio was 1 by definition."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """`kl`, `entropy`, `pull` and other terms as means over the scored tokens, however the loss weighs a token."""
    rejected: Tensor | None = None  # [] int64
    """Number of scored tokens with an advantage other than 0 that the token weights reject; None without weights."""


class PolicyLoss:
    """`loss = sum_t weight_t * (surrogate_t * token weights + terms)`

    A loss is an immutable value: two with the same parts are equal.

    Args:
        level: the log-ratio of a token, its own or its sequence's (`gruppo.loss.parts`).
        surrogate: the loss of a token, from ratio and advantage (`gruppo.loss.parts`).
        weights: token weights, which multiply the surrogate (`gruppo.loss.weights`).
        terms: what is added (`gruppo.loss.terms`).
        aggregate: the weight of a token in the sum (`gruppo.loss.parts`).
        rejected: tokens that a weight of 0 rejects stay "counted" in the means, or are "left_out" of the loss
            altogether: of the means, of the KL and of the entropy bonus too.
        clip_range: (low, high), the band outside which metrics count a ratio as clipped. None: that of the surrogate.
        correction, select: further weights, one or several: for the gap between sampler and trainer, and for which
            tokens the policy term acts on.
        kl, beta: estimator and coefficient of the KL penalty.
        entropy_coef: coefficient of the entropy bonus.
        pull: coefficient of (log r)^2, which pulls the policy back to the one its ratio is over.
        nll_coef: coefficient of the mean of -logp over the tokens with A > 0.
    """

    level: Level
    surrogate: Surrogate
    weights: tuple[TokenWeight, ...]  # all: of `select`, of `correction`, then further ones
    terms: tuple[Term, ...]  # all: kl, entropy, pull and nll first, whether switched on or not
    aggregate: Aggregate
    rejected: Rejected
    clip_range: tuple[float, float] | None  # None: it clips nothing

    # derived from these, once:
    correction: Weights  # weights that only look at the inputs: one, several or None
    select: Weights  # the other weights
    kl: KLEstimator
    beta: float
    entropy_coef: float
    pull: float
    nll_coef: float
    parts: tuple[Any, ...]  # level, surrogate, weights, and the values of terms that are switched on
    needs: frozenset[str]  # optional inputs that it needs
    is_per_token: bool  # a token's loss depends on that token and the step's totals alone
    is_zero_without_advantage: bool  # the gradient of a sequence is exactly 0 when its advantage is
    rejects: bool  # a weight can leave tokens out of the policy term
    reads_sampler: bool  # it reads the sampler's log-probs, in a weight or in its ratio
    draws_tokens: bool  # it reads the place of each token in the step
    surveys: bool  # more than sequences and tokens must be counted over the whole step before its first backward
    surveys_policy: bool  # and the log-probs of the whole step must be known for that
    differentiates_entropies: bool  # its gradient runs through the entropies too
    has_sequence_ratio: bool  # metrics should count sequences instead of tokens
    caps_every_sign: bool  # metrics should count a ratio above the band whatever the sign of the advantage
    _takes_log_ratio: tuple[bool, ...]  # one per weight
    _surveying: tuple[Any, ...]
    _inside: tuple[Term, ...]  # terms that belong to the policy term
    _added: tuple[Term, ...]  # the others
    _leaves_out: bool

    def __init__(
        self,
        *,
        level: Level = token_level,
        surrogate: Surrogate = Clip(),  # noqa: B008  a frozen value
        weights: tuple[TokenWeight, ...] = (),
        terms: tuple[Term, ...] = (),
        aggregate: Aggregate = sequence_mean,
        rejected: Rejected = "counted",
        clip_range: tuple[float, float] | None = None,
        correction: Weights = None,
        select: Weights = None,
        kl: KLEstimator = k3,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        pull: float = 0.0,
        nll_coef: float = 0.0,
    ) -> None:
        for name, part in (("level", level), ("surrogate", surrogate), ("aggregate", aggregate)):
            if not callable(part):
                raise InputError(f"{name} must be a function or a part of gruppo.loss, got {part!r}")
        given = {"select": as_tuple(select), "correction": as_tuple(correction), "weights": as_tuple(weights)}
        for name, several in given.items():
            if any(isinstance(weight, Term) for weight in several):
                raise InputError(f"{name} takes token weights, got {several!r}; a Term goes into terms=(...)")
        takes = [takes_log_ratio(weight, name) for name, several in given.items() for weight in several]
        own = (
            Term("kl", _coefficient("beta", beta), ReferenceKL(kl)),
            Term("entropy", _coefficient("entropy_coef", entropy_coef), entropy),
            Term("pull", _coefficient("pull", pull), squared_log_ratio),
            Term("nll", _coefficient("nll_coef", nll_coef), PositiveNLL(), place="step"),
        )
        if clip_range is None and isinstance(getattr(surrogate, "high", None), float | int):
            high: float = surrogate.high  # type: ignore[attr-defined]  # just seen
            clip_range = (getattr(surrogate, "low", high), high)
        self.__dict__.update(
            level=level,
            surrogate=surrogate,
            weights=given["select"] + given["correction"] + given["weights"],
            terms=_joined(own, terms),
            aggregate=aggregate,
            rejected=rejected,
            clip_range=clip_range,
            _takes_log_ratio=tuple(takes),
        )
        self._derive()
        self._check()

    def _derive(self) -> None:
        """Set the attributes derived from the parts."""
        active = [term for term in self.terms if term.coef]
        parts = (self.level, self.surrogate, *self.weights, *(term.value for term in active))
        corrections = tuple(weight for weight in self.weights if is_correction(weight))
        needs = frozenset[str]().union(*(trait(part, "needs") for part in parts))
        if not all(hasattr(weight, "needs") for weight in corrections):
            needs |= {"sampler_logps"}  # a user's function: it must need them
        terms = {term.name: term for term in self.terms}
        surveying = tuple(part for part in parts if hasattr(part, "survey"))
        leaves_out = self.rejected == "left_out" and bool(self.weights)
        without_advantage = (self.surrogate, *(term.value for term in active))
        self.__dict__.update(
            {option: sign * terms[name].coef for option, (name, sign) in COEFFICIENTS.items()},
            correction=_one_or_more(corrections),
            select=_one_or_more(tuple(weight for weight in self.weights if weight not in corrections)),
            kl=getattr(terms["kl"].value, "estimator", terms["kl"].value),
            parts=parts,
            needs=needs,
            is_per_token=not leaves_out and all(trait(part, "per_token") for part in parts),
            is_zero_without_advantage=all(trait(part, "zero_without_advantage") for part in without_advantage),
            rejects=bool(self.weights),
            reads_sampler="sampler_logps" in needs,
            draws_tokens=any(trait(part, "draws_tokens") for part in parts),
            surveys=leaves_out or bool(surveying),
            surveys_policy=leaves_out or any(trait(part, "survey_reads_policy") for part in surveying),
            differentiates_entropies=any(
                "entropies" in trait(part, "needs") for part in (self.level, *without_advantage)
            ),
            has_sequence_ratio=trait(self.level, "sequence_ratio"),
            caps_every_sign=trait(self.surrogate, "caps_every_sign"),
            _surveying=surveying,
            _inside=tuple(term for term in active if term.place == "policy"),
            _added=tuple(term for term in active if term.place != "policy"),
            _leaves_out=leaves_out,
        )

    def _check(self) -> None:
        """Raise for parts that contradict each other."""
        if self.rejected not in ("counted", "left_out"):
            raise InputError(f"rejected must be 'counted' or 'left_out', got {self.rejected!r}")
        if trait(self.level, "holds_rho") and any(trait(weight, "holds_rho") for weight in self.weights):
            name = getattr(self.level, "__name__", repr(self.level))
            raise InputError(
                f"the ratio of {name} is over the sampler already, and the correction would weigh by "
                "rho = old / sampler once more; leave it out, or use a mask (KeepWithin, OffPolicySequenceMask)"
            )
        if self.rejected == "left_out" and self.aggregate is local_token_mean:
            raise InputError(
                "rejected='left_out' counts what is left over the whole step, and local_token_mean divides by "
                "the tokens of the local batch; use token_mean, or rejected='counted'"
            )
        kinds = [type(part) for part in self._surveying]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise InputError(f"two of {kind.__name__} would share the numbers they count over the step; give one")
        unknown = sorted(self.needs - _REMEDY.keys())
        if unknown:
            raise InputError(f"a part needs {unknown[0]!r}; the optional inputs are {', '.join(_REMEDY)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a loss does not change once it is made: {name} is fixed. Make another, or use "
            "loss.replace(...) for a coefficient"
        )

    def replace(self, **coefficients: float) -> Self:
        """Copy of the loss with other coefficients: `beta`, `entropy_coef`, `pull` or `nll_coef`."""
        for name in coefficients:
            if name not in COEFFICIENTS:
                raise InputError(f"replace takes {', '.join(COEFFICIENTS)}, got {name!r}; make another loss for a part")
        changed = {COEFFICIENTS[name][0]: _coefficient(name, value) for name, value in coefficients.items()}
        other = copy.copy(self)
        other.__dict__["terms"] = tuple(replace(term, coef=changed.get(term.name, term.coef)) for term in self.terms)
        other._derive()
        return other

    @property
    def _value(self) -> tuple[Any, ...]:
        return (self.level, self.surrogate, self.weights, self.terms, self.aggregate, self.rejected, self.clip_range)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash((type(self), self._value))

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
        """Loss of a batch, or of one micro-batch of a step if `totals` are given.

        Args:
            inputs: `labels`, padded `[B, L]` or packed `[T]`/`[1, T]` with `position_ids` or `cu_seqlens`;
                `labels[t]` is the token scored at slot t, -100 is not scored.
            outputs: `logps` in the labels' shape, or `logits`; optionally `entropies`.
            advantages: one per sequence, or one per token. None means nothing to learn from, and a loss of exactly 0.
            old_logps: log-probs under the policy that sampled; None means on-policy, ratio 1.
            ref_logps: log-probs under the reference policy.
            sampler_logps: the sampler's own log-probs, for a correction.
            totals: what the whole step divides by; None when this call is the whole step.

        Per-token inputs have the labels' shape, or are one list per sequence with one value per scored token.
        """
        given = {"advantages": advantages, "old_logps": old_logps, "ref_logps": ref_logps, "totals": totals}
        aligned = self.align(inputs, outputs, sampler_logps=sampler_logps, **given)
        if advantages is None:
            return LossOutput(loss=aligned.logps[:0].sum(), terms={}, on_policy=aligned.on_policy)
        return self.compute(self.surveyed(aligned) if totals is None else aligned)

    def align(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **given: Any) -> LossInputs:
        """Arguments of a call in internal form, without those this loss does not read."""
        unread = {"ref_logps", "sampler_logps"} - self.needs
        read = {name: value for name, value in given.items() if name not in unread}
        return align(inputs, outputs, with_places=self.draws_tokens, **read)

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
        """Totals of a whole step, with the numbers that parts count over it. Arguments as for a call on the whole step.

        Compute them before the first micro-batch, without gradient, and pass them to each, which then returns its share
        of the loss. `totals` are existing ones to add to.
        """
        aligned = self.align(
            inputs, outputs, advantages=advantages, old_logps=old_logps, sampler_logps=sampler_logps, totals=None
        )
        return self.surveyed(aligned if totals is None else replace(aligned, totals=totals)).totals

    @torch.no_grad()
    def surveyed(self, inputs: LossInputs) -> LossInputs:
        """Inputs of a whole step; their totals hold the numbers that parts count over it, and the rejected tokens."""
        if not self.surveys:
            return inputs
        self.check_needs(inputs, besides=frozenset({"ref_logps"}))
        log_ratio_T = self.level(inputs)
        numbers: dict[str, Tensor] = {}
        for part in self._surveying:
            numbers |= part.survey(inputs, log_ratio_T)
        inputs = replace(inputs, totals=replace(inputs.totals, survey=numbers))
        if self._leaves_out:
            before, left = inputs.segments, inputs.segments.restricted(self._weigh(inputs, log_ratio_T) != 0)
            numbers["rejected_tokens"] = before.length.sum() - left.length.sum()
            numbers["rejected_sequences"] = ((before.length > 0) & (left.length == 0)).sum()
        return inputs

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Loss of aligned inputs."""
        self.check_needs(inputs)
        if inputs.entropies is not None and not self.differentiates_entropies:
            inputs = replace(inputs, entropies=inputs.entropies.detach())
        log_ratio_T = self.level(inputs)
        segments, totals, rejected = inputs.segments, inputs.totals, None
        policy_T = self.surrogate(log_ratio_T, inputs)
        if policy_T.shape != log_ratio_T.shape:
            raise InputError(
                f"surrogate {getattr(self.surrogate, '__name__', self.surrogate)!r} must give a loss per token, shape "
                f"{tuple(log_ratio_T.shape)}, got {tuple(policy_T.shape)} (docs/extending.md)"
            )
        for term in self._inside:
            policy_T = policy_T + term.coef * term.value(inputs, log_ratio_T)
        if self.weights:
            keep_T = self._weigh(inputs, log_ratio_T)
            policy_T = policy_T * keep_T
            rejected = _rejected(inputs, keep_T).sum()
            if self._leaves_out:
                segments = segments.restricted(keep_T != 0)
                totals = replace(
                    totals,
                    sequences=totals.sequences - totals.number("rejected_sequences"),
                    tokens=totals.tokens - totals.number("rejected_tokens"),
                )
        weight_S = self.aggregate(segments, totals).to(inputs.logps.dtype)
        weight_T = segments.keep_(segments.spread(weight_S))  # exactly 0 where nothing is scored
        loss = torch.dot(weight_T, policy_T)
        terms = {"policy": loss.detach()}
        means = {}
        for term in self._added:
            total = mean = term.value(inputs, log_ratio_T)
            if term.place != "step":
                even_T = inputs.segments.spread(token_mean(inputs.segments, inputs.totals).to(total.dtype))
                mean = torch.dot(inputs.segments.keep_(even_T), total.detach())
                total = torch.dot(weight_T, total)
            terms[term.name], means[term.name] = total.detach(), mean.detach()
            loss = loss + term.coef * total
        return LossOutput(loss=loss, terms=terms, means=means, on_policy=inputs.on_policy, rejected=rejected)

    @torch.no_grad()
    def rejected_tokens(self, inputs: LossInputs) -> Tensor:
        """Scored tokens with an advantage other than 0 that the token weights leave out, `[T]` bool."""
        if not self.weights:
            return torch.zeros_like(inputs.logps, dtype=torch.bool)
        return _rejected(inputs, self._weigh(inputs, self.level(inputs)))

    @torch.no_grad()
    def clipped_tokens(self, inputs: LossInputs) -> Tensor | None:
        """-1 where a token is clipped low, 1 where high, else 0, `[T]` int8, as the metric of this loss counts it; None
        for a loss that clips nothing. Tokens of a sequence that is clipped as a whole all are."""
        if self.clip_range is None:
            return None
        if inputs.on_policy:  # the ratio is 1
            return torch.zeros_like(inputs.logps, dtype=torch.int8)
        low, high = self.clip_range
        log_ratio_T, advantages_T, segments = token_level(inputs), inputs.advantages, inputs.segments
        if self.has_sequence_ratio:
            log_ratio_T = segments.spread(segments.mean(log_ratio_T))
            advantages_T = segments.spread(segments.mean(advantages_T))
        ratio_T = log_ratio_T.exp()
        is_low_T, is_high_T = ratio_T < 1 - low, ratio_T > 1 + high
        if self.has_sequence_ratio or not self.caps_every_sign:
            is_low_T, is_high_T = is_low_T & (advantages_T < 0), is_high_T & (advantages_T > 0)
        return is_high_T.to(torch.int8) - is_low_T.to(torch.int8)

    def _weigh(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        """The product of the token weights, `[T]`; for a loss with any."""
        takes = zip(self.weights, self._takes_log_ratio, strict=True)
        each = (weight(inputs, log_ratio_T=log_ratio_T) if by_ratio else weight(inputs) for weight, by_ratio in takes)
        return functools.reduce(operator.mul, each)

    def check_needs(self, inputs: LossInputs, besides: frozenset[str] = frozenset()) -> None:
        """Raise if an input that this loss needs is missing."""
        missing = sorted(name for name in self.needs - besides if getattr(inputs, name) is None)
        if missing:
            made = f"{type(self).__name__}(beta={self.beta:g}, entropy_coef={self.entropy_coef:g})"
            raise InputError(f"{made} needs {missing[0]}, got None. {_REMEDY[missing[0]]}")

    def __repr__(self) -> str:
        """The sum, then each part in words."""
        active = (*self._inside, *self._added)
        added = {"policy": "", "token": "", "step": ""}
        for term in active:
            name = term.name if term.place == "step" else f"{term.name}_t"
            added[term.place] += f" {'-' if term.coef < 0 else '+'} {abs(term.coef):g} * {name}"
        policy = f"(surrogate_t{added['policy']})" if self._inside else "surrogate_t"
        policy = policy if self.select is None else f"select({policy})"
        policy += "" if self.correction is None else " * correction_t"
        words = {"level": self.level, "surrogate": self.surrogate, "select": self.select, "correction": self.correction}
        words |= {term.name: term.value for term in active} | {"weight": self.aggregate}
        lines = [f"{type(self).__name__}: loss = sum_t weight_t * ({policy}{added['token']}){added['step']}"]
        lines += [f"  {name:11} {describe(part)}" for name, part in words.items() if part is not None]
        return "\n".join(lines + ["  rejected    left out of the means"] * (self.rejected == "left_out"))


_REMEDY = {
    "ref_logps": "Pass the reference policy's log-probs, or set beta=0.",
    "entropies": "Put `entropies` into outputs, or set entropy_coef=0 and leave out a selection by entropy.",
    "sampler_logps": "Pass the sampler's log-probs, or leave out the correction (selection, level) that reads them.",
}


def _rejected(inputs: LossInputs, keep_T: Tensor) -> Tensor:
    return (inputs.segments.bits != 0) & (inputs.advantages != 0) & (keep_T == 0)


def _coefficient(option: str, value: float) -> float:
    """The coefficient of a term from the keyword that sets it."""
    lowest, sign = -math.inf if option == "entropy_coef" else 0.0, COEFFICIENTS[option][1]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < lowest:
        raise InputError(f"{option} must be a finite number{' of at least 0' if lowest == 0 else ''}, got {value!r}")
    return sign * value


def _joined(own: tuple[Term, ...], given: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms of the keywords, then those given; one given takes the place of one whose keyword was left at 0."""
    joined = {term.name: term for term in own}
    for term in given:
        if not isinstance(term, Term):
            raise InputError(f"terms must hold Term(name, coef, value), got {term!r}")
        if term.name == "policy" or (term.name in joined and joined[term.name].coef):
            raise InputError(f"there is a term named {term.name!r} already; give one, or another name")
        joined[term.name] = term
    return tuple(joined.values())


def _one_or_more(weights: tuple[TokenWeight, ...]) -> Weights:
    return None if not weights else weights[0] if len(weights) == 1 else weights
