"""How far sampler and trainer are apart: the numbers that say whether a correction is needed, and whether it helps.

    rho_t = exp(old_t - sampler_t)

over tokens drawn from the sampler. The mean of rho is about 1 whatever happens, so look at its tails. Exact under any
split, as the other metrics (`metric/state.py` says how).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs, PerToken, align
from gruppo.loss.weights import MAX_LOG_RHO
from gruppo.metric.state import State, exact_sum_
from gruppo.parallel.ranks import groups_of, reduction_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Rows of State.sums and State.maxima
TOKENS, KL, RHO, SQUARED, ABOVE, BELOW, SEQUENCES, SEQUENCE_RHO, SEQUENCE_SQUARED, GAP = range(10)
LARGEST, SMALLEST, WIDEST = range(3)


class MismatchMetric:
    """Accumulates over micro-batches and reports once; keys `sampler/...`.

    Args:
        device_mesh: reduce over all its ranks.
        process_group: reduce over this group instead.
        tail: a token counts in the tails when rho > tail or rho < 1 / tail.
        ignore_index: the label of slots that are not scored.
    """

    def __init__(
        self,
        device_mesh: "DeviceMesh | None" = None,
        process_group: "ProcessGroup | None" = None,
        tail: float = 2.0,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        if not tail > 1:
            raise InputError(f"tail must exceed 1, got {tail!r}; 2 counts ratios above 2 and below 1/2")
        self.groups = groups_of(device_mesh, process_group)
        self.tail = tail
        self.ignore_index = ignore_index
        self._state: State | None = None

    @torch.no_grad()
    def accumulate(self, inputs: Mapping[str, Any], *, old_logps: PerToken, sampler_logps: PerToken) -> None:
        """Add one micro-batch; `inputs` as for a loss."""
        labels = inputs["labels"]
        blank = {"logps": torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)}
        aligned = align(
            inputs,
            blank,
            advantages=None,
            old_logps=old_logps,
            sampler_logps=sampler_logps,
            ignore_index=self.ignore_index,
        )
        self.add(aligned)

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Add the micro-batch that a loss was computed on."""
        segments = inputs.segments
        assert inputs.sampler_logps is not None
        gap_T = (inputs.old_logps - inputs.sampler_logps).double()
        log_rho_T = gap_T.clamp(-MAX_LOG_RHO, MAX_LOG_RHO)
        log_rho_S = segments.sum(log_rho_T).clamp(-MAX_LOG_RHO, MAX_LOG_RHO)
        has_tokens_S = segments.length > 0
        scored = lambda values_T: exact_sum_(segments.keep(values_T))  # noqa: E731
        rho_T, rho_S = log_rho_T.exp(), torch.where(has_tokens_S, log_rho_S.exp(), 0)
        sums = [
            segments.length.sum().double(),
            scored(log_rho_T.expm1() - log_rho_T),
            scored(rho_T),
            scored(rho_T.square()),
            scored((rho_T > self.tail).double()),
            scored((rho_T < 1 / self.tail).double()),
            has_tokens_S.sum().double(),
            exact_sum_(rho_S.clone()),
            exact_sum_(rho_S.square()),
            scored(gap_T.abs()),
        ]
        if self._state is None:
            self._state = State.empty(10, 3, (0, 2), gap_T.device)
        self._state.sums += torch.stack(sums)
        unscored_T = ~segments.mask
        maxima = (log_rho_T, -log_rho_T, gap_T.abs())
        self._state.see_maxima(*(x.masked_fill(unscored_T, -math.inf) for x in maxima))

    def calculate(self) -> dict[str, float]:
        """The numbers of everything since the last `reset`, over all ranks; {} when nothing was scored."""
        if self._state is None:
            if not self.groups:
                return {}
            self._state = State.empty(10, 3, (0, 2), reduction_device(self.groups))
        state = self._state.reduced(self.groups)
        sums, maxima = state.sums.tolist(), state.maxima.tolist()
        tokens, sequences = sums[TOKENS], sums[SEQUENCES]
        if not tokens:
            return {}
        return {
            "sampler/logp_gap_mean": sums[GAP] / tokens,
            "sampler/logp_gap_max": maxima[WIDEST],
            "sampler/kl": sums[KL] / tokens,
            "sampler/rho_mean": sums[RHO] / tokens,
            "sampler/rho_max": math.exp(maxima[LARGEST]),
            "sampler/rho_min": math.exp(-maxima[SMALLEST]),
            "sampler/rho_high_frac": sums[ABOVE] / tokens,
            "sampler/rho_low_frac": sums[BELOW] / tokens,
            "sampler/chi2": sums[SQUARED] / tokens - 1,
            "sampler/ess": sums[RHO] ** 2 / (sums[SQUARED] * tokens),
            "sampler/sequence_chi2": sums[SEQUENCE_SQUARED] / sequences - 1,
            "sampler/sequence_ess": sums[SEQUENCE_RHO] ** 2 / (sums[SEQUENCE_SQUARED] * sequences),
        }

    def reset(self) -> None:
        """Forget everything."""
        self._state = None
