"""Policy metrics: how far the policy moved on the tokens it was trained on, and what its loss clipped.

The three classes differ in what counts as clipped. `metric_for` finds the one that fits a loss.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs, PerToken
from gruppo.loss.parts import MAX_LOG_RATIO, token_level
from gruppo.loss.policy import PolicyLoss
from gruppo.loss.terms import MAX_DELTA
from gruppo.metric.base import Metric, exact_sum_
from gruppo.parallel.ranks import gather_over, reduction_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TOP_FIELDS = ("kl", "sequence", "position", "token_id", "ratio", "new_logp", "old_logp")
"""Columns of a token in `train/top_k_kl`."""


class PolicyMetric(Metric):
    """Base class of the metrics of a policy's step; keys `train/...`. Further arguments are those of `Metric`.

    Args:
        epsilon: a ratio below 1 - epsilon counts as clipped low. None: no clip rates are reported.
        epsilon_high: a ratio above 1 + epsilon_high counts as clipped high; None: epsilon.
        temperature: multiplies both log-probs before means and KL, which approximates the log-probs at temperature 1.
            Clip rates and the ratio use the log-probs as they are.
        top_k_kl: report the K tokens with the largest KL.
    """

    sums = ("tokens", "new", "compared", "old", "diff", "kl", "with_entropy", "entropy", "units", "low", "high")
    maxima = ("kl_max", "ratio_max")

    def __init__(
        self,
        device_mesh: "DeviceMesh | None" = None,
        process_group: "ProcessGroup | None" = None,
        epsilon: float | None = 0.2,
        epsilon_high: float | None = None,
        temperature: float = 1.0,
        top_k_kl: int = 0,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        if any(value is not None and not value > 0 for value in (epsilon, epsilon_high)):
            raise InputError(f"epsilon and epsilon_high must be positive, got {epsilon!r} and {epsilon_high!r}")
        if epsilon is None and epsilon_high is not None:
            raise InputError(f"epsilon=None counts nothing as clipped; leave epsilon_high={epsilon_high!r} out")
        if not temperature > 0:
            raise InputError(f"temperature must be positive, got {temperature!r}")
        if top_k_kl < 0:
            raise InputError(f"top_k_kl must be 0 or more, got {top_k_kl!r}")
        self.clips = epsilon is not None
        self.low = 1 - (epsilon or 0.0)
        self.high = 1 + ((epsilon or 0.0) if epsilon_high is None else epsilon_high)
        self.temperature = temperature
        self.top_k_kl = top_k_kl
        super().__init__(device_mesh, process_group, ignore_index)

    @classmethod
    def from_loss(cls, loss: PolicyLoss, **options: Any) -> Self:
        """A metric that counts as clipped what this loss clips."""
        if loss.clip_range is None:
            raise InputError(f"{type(loss).__name__} has no clip_range; give epsilon and epsilon_high instead")
        low, high = loss.clip_range
        return cls(epsilon=low, epsilon_high=high, **options)

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number of tokens (or sequences), of those clipped low and of those clipped high, each `[]`."""
        raise NotImplementedError

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]  it reads these alone
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_logps: PerToken | None = None,
        advantages: Tensor | Sequence[float] | PerToken | None = None,
    ) -> None:
        """Add one micro-batch. Arguments as for a loss; without `old_logps` or `advantages` fewer keys are reported."""
        super().accumulate(inputs, outputs, old_logps=old_logps, advantages=advantages)

    def measure(self, inputs: LossInputs) -> Mapping[str, Tensor]:
        segments = inputs.segments
        num_tokens = segments.length.sum()
        new_T, old_T = inputs.logps, inputs.old_logps
        if self.temperature != 1:
            new_T, old_T = new_T * self.temperature, old_T * self.temperature
        values = {"tokens": num_tokens}
        # Aligned values are 0 in slots that are not scored, and so are their differences and KL: plain sums will do.
        # These tensors were made for this call, so that the sums may overwrite them; they come last.
        if not inputs.on_policy:
            kl_T, ratio_T = kl_and_ratio(new_T, old_T)
            if self.temperature != 1:
                ratio_T = token_level(inputs).exp()
            if self.top_k_kl:
                rows = self._top_tokens(inputs, kl_T, ratio_T, new_T, old_T)
                self._top = self._best(rows if self._top is None else torch.cat([self._top, rows]))
            if inputs.has_advantages and self.clips:
                values["units"], values["low"], values["high"] = self.count_clipped(inputs, ratio_T)
            # Both are never negative, so 0 in a slot that is not scored cannot win.
            if len(kl_T):
                values |= {"kl_max": kl_T.amax(), "ratio_max": segments.keep_(ratio_T).amax()}
            values |= {"compared": num_tokens, "old": exact_sum_(old_T), "kl": exact_sum_(kl_T)}
        values["new"] = exact_sum_(new_T)
        if not inputs.on_policy:
            values["diff"] = values["new"] - values["old"]
        if inputs.entropies is not None:
            values |= {"with_entropy": num_tokens, "entropy": exact_sum_(inputs.entropies)}
        return values

    def report(self, totals: Mapping[str, float]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if tokens := totals["tokens"]:
            mean_new = totals["new"] / tokens
            results["train/policy_confidence"] = torch.tensor(mean_new, dtype=torch.float64).exp().item()
            results["train/mean_new_logp"] = mean_new
        if compared := totals["compared"]:
            results["train/mean_old_logp"] = totals["old"] / compared
            results["train/logp_diff_mean"] = totals["diff"] / compared
            results["train/approx_kl"] = totals["kl"] / compared
            results["train/token_kl_max"] = totals["kl_max"]
            results["train/token_ratio_max"] = totals["ratio_max"]
        if totals["with_entropy"]:
            results["train/entropy"] = totals["entropy"] / totals["with_entropy"]
        if units := totals["units"]:
            results["train/clip_ratio"] = (totals["low"] + totals["high"]) / units
            results["train/clip_ratio_low"] = totals["low"] / units
            results["train/clip_ratio_high"] = totals["high"] / units
        if self.top_k_kl and (top := self._top_of_all_ranks()):
            results["train/top_k_kl"] = top
        return results

    # --- the K tokens that moved most -----------------------------------------------------------------------------

    def _top_tokens(self, inputs: LossInputs, kl_T: Tensor, ratio_T: Tensor, new_T: Tensor, old_T: Tensor) -> Tensor:
        """The K scored tokens with the largest KL as rows of TOP_FIELDS, best first, `[<= K, fields]` float64.

        Of equal tokens the earlier comes first, so that the choice does not depend on how the data was split. That is
        one top-K over integers: the bits of a non-negative float32 order like the number, and the slot breaks the tie.
        """
        segments = inputs.segments
        num_slots = segments.num_slots
        slot_T = torch.arange(num_slots, device=kl_T.device)
        kl_T = kl_T.to(torch.float32).contiguous()  # rows are merged by what they were chosen by
        bits_T = kl_T.view(torch.int32).to(torch.int64)
        key_T = torch.where(segments.mask, (bits_T << 32) | (num_slots - slot_T), -1)
        keys, best = key_T.topk(min(self.top_k_kl, num_slots))
        columns = [
            kl_T,
            self._num_sequences + segments.spread(torch.arange(segments.num_sequences, device=kl_T.device)),
            segments.position() if inputs.positions is None else inputs.positions,
            inputs.labels,
            ratio_T,
            new_T,
            old_T,
        ]
        rows = torch.stack([column[best].to(torch.float64) for column in columns], 1)
        rows[:, 0] = torch.where(keys >= 0, rows[:, 0], -torch.inf)  # fewer scored tokens than K
        return rows

    def _best(self, rows: Tensor) -> Tensor:
        """The k rows with the largest KL. The sort is stable: of equal rows the earlier stays."""
        return rows[rows[:, 0].argsort(descending=True, stable=True)[: self.top_k_kl]]

    def _top_of_all_ranks(self) -> list[dict[str, Any]]:
        """Records of the best k of all ranks; sequences are numbered through in rank order."""
        device = reduction_device(self.groups) if self._top is None else self._top.device
        own = torch.full((self.top_k_kl + 1, len(TOP_FIELDS)), -torch.inf, dtype=torch.float64, device=device)
        if self._top is not None:
            own[: len(self._top)] = self._top
        own[-1] = self._num_sequences
        per_rank = gather_over(self.groups, own)
        per_rank[:, :-1, 1] += (per_rank[:, -1, 0].cumsum(0) - per_rank[:, -1, 0])[:, None]  # sequences of ranks before
        rows = self._best(per_rank[:, :-1].flatten(0, 1))
        records = [dict(zip(TOP_FIELDS, row, strict=True)) for row in rows.tolist() if row[0] != -torch.inf]
        whole = ("sequence", "position", "token_id")
        return [{name: int(v) if name in whole else v for name, v in record.items()} for record in records]


class GRPOMetric(PolicyMetric):
    """Token-level clipping (GRPO, DAPO, BNPO, Dr. GRPO, the band of SAPO): clipped where the gradient is cut off, low
    where A < 0, high where A > 0."""

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The ratio of a slot that is not scored is 1, which no band leaves out.
        # A comparison that writes 1.0 and 0.0 takes a third of the time of one that writes bools.
        out_T, push_T = torch.empty_like(ratio_T), torch.empty_like(ratio_T)
        low = torch.dot(torch.lt(ratio_T, self.low, out=out_T), torch.lt(inputs.advantages, 0, out=push_T))
        high = torch.dot(torch.gt(ratio_T, self.high, out=out_T), torch.gt(inputs.advantages, 0, out=push_T))
        return inputs.segments.length.sum(), low, high


class CISPOMetric(PolicyMetric):
    """Capped weights: a token is clipped when its ratio is out of bounds, whatever its advantage."""

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The ratio of a slot that is not scored is 1, which no band leaves out.
        counts = (ratio_T < self.low).count_nonzero(), (ratio_T > self.high).count_nonzero()
        return inputs.segments.length.sum(), *counts


class GSPOMetric(PolicyMetric):
    """Sequence-level clipping: a sequence is clipped when its geometric-mean ratio is out of bounds on the side its
    advantage pushes.

    With one advantage per token the sign of their mean decides. Sequences without scored tokens are not counted.
    """

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ratio_S = inputs.segments.mean(token_level(inputs)).exp()
        advantage_S = inputs.segments.mean(inputs.advantages)
        low_S = (ratio_S < self.low) & (advantage_S < 0)
        high_S = (ratio_S > self.high) & (advantage_S > 0)
        return (inputs.segments.length > 0).sum(), low_S.sum(), high_S.sum()


def metric_for(loss: PolicyLoss, **options: Any) -> PolicyMetric:
    """The metric of a loss: sequence ratios are counted per sequence, capped weights whatever the advantage, all else
    per token. A loss that clips nothing gets no clip rates."""
    cls = GRPOMetric
    if loss.has_sequence_ratio:
        cls = GSPOMetric
    elif loss.caps_every_sign:
        cls = CISPOMetric
    return cls(epsilon=None, **options) if loss.clip_range is None else cls.from_loss(loss, **options)


# --- formulas --------------------------------------------------------------------------------------------------------


def approx_kl(new_logps_T: Tensor, old_logps_T: Tensor) -> Tensor:
    """k3 of KL(old || new) from tokens drawn from old: r - 1 - log r, r = new / old.

    Never negative; the difference is bounded to +-40.
    """
    return kl_and_ratio(new_logps_T, old_logps_T)[0]


def kl_and_ratio(new_logps_T: Tensor, old_logps_T: Tensor) -> tuple[Tensor, Tensor]:
    """`approx_kl` and the ratio that a token-level loss sees, from one exponential, without gradient."""
    diff_T = (new_logps_T - old_logps_T).clamp_(-MAX_DELTA, MAX_DELTA)
    ratio_T = diff_T.expm1()
    kl_T = (ratio_T - diff_T).clamp_(min=0)
    return kl_T, ratio_T.add_(1).clamp_(max=math.exp(MAX_LOG_RATIO))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct.

        1 - C(n - c, k) / C(n, k)

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise InputError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={num_correct}, k={k}")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
