"""What all policy metrics share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs, PerToken, align
from gruppo.metric.functional import kl_and_ratio, token_ratio
from gruppo.metric.high_kl import FIELDS, as_records, top_rows
from gruppo.metric.state import State, exact_sum_
from gruppo.parallel.ranks import groups_of, reduction_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from gruppo.loss.policy import PolicyLoss

# Rows of State.sums and State.maxima
TOKENS, NEW, COMPARED, OLD, DIFF, KL, WITH_ENTROPY, ENTROPY, UNITS, LOW, HIGH = range(11)
KL_MAX, RATIO_MAX = range(2)
NUM_SUMS, NUM_MAXIMA = 11, 2


class PolicyMetric:
    """Accumulates over micro-batches and reports once.

    Given tensors, padded or with `cu_seqlens`, `accumulate` never makes the host wait for a GPU; `calculate` does,
    once. (Lists per sequence and `position_ids` have to be read on the host.) `calculate` does not forget: call `reset`
    before the next step.

    Args:
        device_mesh: reduce over all its ranks.
        process_group: reduce over this group instead.
        epsilon: a ratio below 1 - epsilon counts as clipped low. None: no clip rates are reported.
        epsilon_high: a ratio above 1 + epsilon_high counts as clipped high; None: epsilon.
        temperature: multiplies both log-probs before means and KL. This undoes the scaling of the logits but not the
            change of their normaliser, so it approximates the log-probs at temperature 1. Clip rates and the ratio
            always use the log-probs as they are, because those are what the loss clips.
        top_k_kl: report the K tokens with the largest KL.
        ignore_index: the label of slots that are not scored.
    """

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
        self.groups = groups_of(device_mesh, process_group)
        self.clips = epsilon is not None
        self.low = 1 - (epsilon or 0.0)
        self.high = 1 + ((epsilon or 0.0) if epsilon_high is None else epsilon_high)
        self.temperature = temperature
        self.top_k_kl = top_k_kl
        self.ignore_index = ignore_index
        self._state: State | None = None

    @classmethod
    def from_loss(cls, loss: "PolicyLoss", **options: Any) -> Self:
        """A metric that counts as clipped what this loss clips."""
        if loss.clip_range is None:
            raise InputError(f"{type(loss).__name__} has no clip_range; give epsilon and epsilon_high instead")
        low, high = loss.clip_range
        return cls(epsilon=low, epsilon_high=high, **options)

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many tokens (or sequences) there are, how many are clipped low, and how many high, each `[]`."""
        raise NotImplementedError

    def accumulate(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        old_logps: PerToken | None = None,
        advantages: Tensor | Sequence[float] | PerToken | None = None,
    ) -> None:
        """Add one micro-batch. Arguments as for a loss; without `old_logps` or `advantages` fewer keys are reported."""
        if not isinstance(outputs, Mapping):
            raise InputError(f"outputs must be a mapping with 'logps' or 'logits', got {type(outputs).__name__}")
        with torch.no_grad():
            aligned = align(inputs, outputs, advantages=advantages, old_logps=old_logps, ignore_index=self.ignore_index)
            self._add(aligned, has_advantages=advantages is not None)

    def add(self, inputs: LossInputs) -> None:
        """Add the micro-batch that a loss was computed on: its sequences with an advantage other than 0."""
        self._add(inputs.of_live(), has_advantages=True)

    def _add(self, aligned: LossInputs, has_advantages: bool) -> None:
        segments = aligned.segments
        if self._state is None:
            self._state = State.empty(NUM_SUMS, NUM_MAXIMA, (self.top_k_kl, len(FIELDS)), segments.bits.device)
        state = self._state
        new_T, old_T = self._scaled(aligned.logps), self._scaled(aligned.old_logps)
        num_tokens = segments.length.sum().to(torch.float64)
        sums = [torch.zeros_like(num_tokens)] * NUM_SUMS
        # Aligned values are 0 in slots that are not scored, and so are their differences and KL: plain sums will do.
        # These tensors were made for this call, so that the sums may use them up; they come last.
        if not aligned.on_policy:
            kl_T, ratio_T = kl_and_ratio(new_T, old_T)
            if self.temperature != 1:
                ratio_T = token_ratio(aligned)
            if self.top_k_kl:
                state.merge_top(top_rows(aligned, kl_T, ratio_T, new_T, old_T, self.top_k_kl, state.num_sequences))
            if has_advantages and self.clips:
                counts = self.count_clipped(aligned, ratio_T)
                sums[UNITS], sums[LOW], sums[HIGH] = (count.to(torch.float64) for count in counts)
            # Both are never negative, so 0 in a slot that is not scored cannot win.
            state.see_maxima(kl_T, segments.keep_(ratio_T))
            sums[COMPARED], sums[OLD], sums[KL] = num_tokens, exact_sum_(old_T), exact_sum_(kl_T)
        sums[TOKENS], sums[NEW] = num_tokens, exact_sum_(new_T)
        if not aligned.on_policy:
            sums[DIFF] = sums[NEW] - sums[OLD]
        if aligned.entropies is not None:
            sums[WITH_ENTROPY], sums[ENTROPY] = num_tokens, exact_sum_(aligned.entropies)
        state.sums += torch.stack(sums)
        state.num_sequences += segments.num_sequences

    def _scaled(self, logps_T: Tensor) -> Tensor:
        return logps_T if self.temperature == 1 else logps_T * self.temperature

    def calculate(self) -> dict[str, Any]:
        """The metrics of everything since the last `reset`, over all ranks; {} when nothing was scored."""
        if self._state is None:
            if not self.groups:
                return {}
            device = reduction_device(self.groups)
            self._state = State.empty(NUM_SUMS, NUM_MAXIMA, (self.top_k_kl, len(FIELDS)), device)
        state = self._state.reduced(self.groups)
        sums, maxima = state.sums.tolist(), state.maxima.tolist()
        results: dict[str, Any] = {}
        if sums[TOKENS]:
            mean_new = sums[NEW] / sums[TOKENS]
            results["train/policy_confidence"] = torch.tensor(mean_new, dtype=torch.float64).exp().item()
            results["train/mean_new_logp"] = mean_new
        if sums[COMPARED]:
            results["train/mean_old_logp"] = sums[OLD] / sums[COMPARED]
            results["train/logp_diff_mean"] = sums[DIFF] / sums[COMPARED]
            results["train/approx_kl"] = sums[KL] / sums[COMPARED]
            results["train/token_kl_max"] = maxima[KL_MAX]
            results["train/token_ratio_max"] = maxima[RATIO_MAX]
        if sums[WITH_ENTROPY]:
            results["train/entropy"] = sums[ENTROPY] / sums[WITH_ENTROPY]
        if sums[UNITS]:
            results["train/clip_ratio"] = (sums[LOW] + sums[HIGH]) / sums[UNITS]
            results["train/clip_ratio_low"] = sums[LOW] / sums[UNITS]
            results["train/clip_ratio_high"] = sums[HIGH] / sums[UNITS]
        if self.top_k_kl and sums[COMPARED]:
            results["train/top_k_kl"] = as_records(state.top)
        return results

    def reset(self) -> None:
        """Forget everything."""
        self._state = None
