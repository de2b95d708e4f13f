"""Mismatch metric: distance between the sampler's log-probs and the trainer's, rho_t = exp(old_t - sampler_t)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs, PerToken
from gruppo.loss.weights import MAX_LOG_RHO
from gruppo.metric.base import Metric, exact_sum_, largest, total

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class MismatchMetric(Metric):
    """Ratio of trainer to sampler over a step; keys `sampler/...`.

    A token counts in the tails when rho > `tail` or rho < 1 / `tail`. Further arguments are those of `Metric`.
    """

    sums = ("tokens", "gap", "kl", "rho", "rho2", "above", "below", "sequences", "sequence_rho", "sequence_rho2")
    maxima = ("gap_max", "log_rho_max", "minus_log_rho_max")

    def __init__(
        self,
        device_mesh: "DeviceMesh | None" = None,
        process_group: "ProcessGroup | None" = None,
        tail: float = 2.0,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        if not tail > 1:
            raise InputError(f"tail must exceed 1, got {tail!r}; 2 counts ratios above 2 and below 1/2")
        self.tail = tail
        super().__init__(device_mesh, process_group, ignore_index)

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]  it reads no outputs
        self, inputs: Mapping[str, Any], *, old_logps: PerToken, sampler_logps: PerToken
    ) -> None:
        """Add one micro-batch; `inputs` as for a loss."""
        labels = inputs["labels"]
        blank = {"logps": torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)}
        super().accumulate(inputs, blank, old_logps=old_logps, sampler_logps=sampler_logps)

    def add(self, inputs: LossInputs, live_only: bool = False) -> None:
        """Add the micro-batch that a loss was computed on: all of its sequences."""
        super().add(inputs, live_only)

    def measure(self, inputs: LossInputs) -> Mapping[str, Tensor]:
        segments = inputs.segments
        assert inputs.sampler_logps is not None
        gap_T = (inputs.old_logps - inputs.sampler_logps).double()
        log_rho_T = gap_T.clamp(-MAX_LOG_RHO, MAX_LOG_RHO)
        has_tokens_S = segments.length > 0
        rho_T = log_rho_T.exp()
        rho_S = torch.where(has_tokens_S, segments.sum(log_rho_T).clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp(), 0)
        return {
            "tokens": segments.length.sum(),
            "gap": total(inputs, gap_T.abs()),
            "kl": total(inputs, log_rho_T.expm1() - log_rho_T),
            "rho": total(inputs, rho_T),
            "rho2": total(inputs, rho_T.square()),
            "above": total(inputs, rho_T > self.tail),
            "below": total(inputs, rho_T < 1 / self.tail),
            "sequences": has_tokens_S.sum(),
            "sequence_rho": exact_sum_(rho_S.clone()),
            "sequence_rho2": exact_sum_(rho_S.square()),
            "gap_max": largest(inputs, gap_T.abs()),
            "log_rho_max": largest(inputs, log_rho_T),
            "minus_log_rho_max": largest(inputs, -log_rho_T),
        }

    def report(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens, sequences = totals["tokens"], totals["sequences"]
        if not tokens:
            return {}
        return {
            "sampler/logp_gap_mean": totals["gap"] / tokens,
            "sampler/logp_gap_max": totals["gap_max"],
            "sampler/kl": totals["kl"] / tokens,
            "sampler/rho_mean": totals["rho"] / tokens,
            "sampler/rho_max": math.exp(totals["log_rho_max"]),
            "sampler/rho_min": math.exp(-totals["minus_log_rho_max"]),
            "sampler/rho_high_frac": totals["above"] / tokens,
            "sampler/rho_low_frac": totals["below"] / tokens,
            "sampler/chi2": totals["rho2"] / tokens - 1,
            "sampler/ess": totals["rho"] ** 2 / (totals["rho2"] * tokens),
            "sampler/sequence_chi2": totals["sequence_rho2"] / sequences - 1,
            "sampler/sequence_ess": totals["sequence_rho"] ** 2 / (totals["sequence_rho2"] * sequences),
        }
