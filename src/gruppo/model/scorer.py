"""Scorer: log-probs and entropies of a batch's scored tokens, and the gradient of a loss of them.

The model runs on rows padded on the right: a causal model never looks to the right, so the padding needs no attention
mask and changes nothing. A batch `in_one_row` runs as one long row instead, for attention that takes sequence
boundaries from the positions. A batch with `shared` rows runs on those: each prompt once. Only the scored slots reach
the head, in float32.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gruppo.batch import PackedBatch, Totals
from gruppo.batch.packed import pad_tokens
from gruppo.kernel.head import Head, HeadResult, best_route
from gruppo.kernel.index import take_repeated, take_unique
from gruppo.kernel.reference import check_temperature, logps_and_entropy
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.model.attention_hook import call_keywords, set_shared_attention
from gruppo.model.logp_head import SMALL_LOGITS, HeadCall, install

logger = logging.getLogger(__name__)

HeadChoice = Literal["auto", "walk", "dense"]


class Scorer:
    """Scores the tokens of a batch under a transformers model (with or without a PEFT adapter in it).

    Args:
        head: "walk" over windows of tokens, "dense" for all logits at once, or "auto" by size.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, head: HeadChoice = "auto") -> None:
        check_temperature(temperature)
        self.model = model
        self.temperature = temperature
        self.choice: HeadChoice = head
        self.base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
        self.head = install(model)
        if self.head is None:
            logger.info("%s: logits come from the model as it is, not from a head of ours", type(model).__name__)
        else:
            route = best_route(self.head.weight).name
            logger.info("%s: head=%s, %s when it walks", type(model).__name__, head, route)

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the scored tokens, `[N]` float32."""
        call = self._run(batch, None)
        assert call.logps is not None and call.entropies is not None
        return call.logps, call.entropies

    def loss_of(self, batch: PackedBatch, loss: PolicyLoss, totals: Totals) -> tuple[LossOutput, LossInputs]:
        """The loss of a batch, with its gradient still to be taken, and what it was computed on."""
        if not self.walks(batch.num_slots):
            inputs = LossInputs.of(batch, *self(batch), totals)
            return loss.compute(inputs), inputs

        def inputs_of(dtype: torch.dtype) -> LossInputs:
            blank = torch.zeros(len(batch.scored), dtype=dtype, device=batch.scored.device)
            return LossInputs.of(batch, blank, None, totals)

        walk = LossWalk(loss, inputs_of, batch.lengths)
        call = self._run(batch, walk)
        assert call.loss is not None and call.logps is not None
        output = LossOutput(loss=call.loss, terms=walk.terms, on_policy=walk.inputs.on_policy, rejected=walk.rejected)
        old = call.logps if walk.inputs.on_policy else walk.inputs.old_logps
        return output, replace(walk.inputs, logps=call.logps, old_logps=old, entropies=call.entropies)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits of the scored slots at temperature 1, `[N, V]`, from the hidden states that are scored."""
        call = self._run(batch, None, gives_logits=True)
        assert call.logits is not None
        return call.logits

    def at(self, temperature: float) -> "Scorer":
        """The same scorer at another temperature."""
        check_temperature(temperature)
        other = copy.copy(self)
        other.temperature = temperature
        return other

    def walks(self, num_slots: int) -> bool:
        """Does the head walk over windows for a batch of this many slots? Scoring and training decide alike."""
        if self.head is None or self.choice == "dense":
            return False
        return self.choice == "walk" or num_slots * self.head.out_features > SMALL_LOGITS

    def _run(self, batch: PackedBatch, walk: "LossWalk | None", *, gives_logits: bool = False) -> HeadCall:
        keywords, take = self._keywords(batch)
        call = HeadCall(
            take=take,
            labels=batch.labels[batch.scored],
            temperature=self.temperature,
            walks=self.walks(batch.num_slots),
            gives_logits=gives_logits,
            train=walk,
        )
        if self.head is not None:
            self.head.call = call
        try:
            result = self.model(**keywords)
        finally:
            if self.head is not None:
                self.head.call = None
        if self.head is None:
            call.logits = take(result.logits)
            call.logps, call.entropies = logps_and_entropy(call.logits, call.labels, self.temperature)
        if hasattr(self.model, "reshard") and not torch.is_grad_enabled():
            # FSDP gathers the outermost weights for a backward that will not come; its parameters would be others.
            self.model.reshard()  # type: ignore[operator]
        return call

    def _keywords(self, batch: PackedBatch) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
        """Keywords of the model's call, and from its output `[B, L, ...]` to that of the scored slots `[N, ...]`."""
        scored = batch.scored
        if batch.shared is not None:
            set_shared_attention(self.base)
            index_N = batch.shared.slot_of[scored]
            return call_keywords(batch.shared), lambda values: take_repeated(values.flatten(0, 1), index_N)
        if batch.in_one_row:
            keywords = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
            return keywords | {"use_cache": False}, lambda values: take_unique(values[0], scored)
        rows_SL = pad_tokens(batch.input_ids, batch.cu_seqlens, fill=0)
        row_S = torch.arange(batch.num_sequences, device=batch.labels.device)
        take = take_unique
        if batch.distinct is not None and len(batch.distinct) < batch.num_sequences:
            # Equal rows have equal outputs, so one of each kind runs; the backward adds what comes back from copies.
            assert batch.kind is not None
            rows_SL, row_S, take = rows_SL[batch.distinct], batch.kind, take_repeated
        # Slot t of the batch is column position_ids[t] of its row.
        row_T = torch.repeat_interleave(row_S, batch.cu_seqlens.diff(), output_size=batch.num_slots)
        index_N = (row_T * rows_SL.shape[1] + batch.position_ids)[scored]
        return {"input_ids": rows_SL, "use_cache": False}, lambda values: take(values.flatten(0, 1), index_N)


@dataclass(slots=True)
class LossWalk:
    """The loss of a walk over windows: dL/dlogp of each window, and the sums of what the loss reports."""

    loss: PolicyLoss
    make_inputs: Callable[[torch.dtype], LossInputs]
    """The inputs over all scored tokens, for log-probs of this dtype, which are not read."""
    lengths: Sequence[int]
    """Scored tokens of each sequence."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    rejected: Tensor | None = None
    dtype: torch.dtype = torch.float32
    _inputs: LossInputs | None = None
    _total: Tensor | None = None

    @property
    def inputs(self) -> LossInputs:
        """Made at the first window, while the GPU is busy with its product."""
        if self._inputs is None:
            self._inputs = self.make_inputs(self.dtype)
        return self._inputs

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor, trains: bool) -> tuple[HeadResult, Tensor]:
        """Log-probs and gradients, and the loss; `trains`: whether the output weight gets a gradient."""
        self.dtype = head.dtype
        result = head.train(
            hidden,
            labels,
            self._gradient,
            lengths=None if self.loss.is_per_token else self.lengths,
            needs_weight=trains,
            entropy_gradient=self.loss.differentiates_entropies,
        )
        total = torch.zeros((), dtype=head.dtype, device=hidden.device) if self._total is None else self._total
        return result, total

    def _gradient(self, rows: slice, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        logps = logps.detach().requires_grad_()
        wants_entropy = self.loss.differentiates_entropies
        entropies = entropies.detach().requires_grad_(wants_entropy)
        output = self.loss.compute(self.inputs.window(rows, logps, entropies))
        wanted = (logps, entropies) if wants_entropy else (logps,)
        grads = torch.autograd.grad(output.loss, wanted, allow_unused=True)
        self._total = _plus(self._total, output.loss.detach())
        for name, value in output.terms.items():
            self.terms[name] = _plus(self.terms.get(name), value)
        if output.rejected is not None:
            self.rejected = _plus(self.rejected, output.rejected)
        grad_logps = torch.zeros_like(logps) if grads[0] is None else grads[0]
        return grad_logps, grads[1] if wants_entropy else None


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value
