"""PackedBatch -> hidden states, log-probs and entropies of its scored slots.

The body of the model runs on rows padded on the right: a causal model never looks to the right, so the padding needs
no attention mask and changes nothing. A batch `in_one_row` runs as one long row instead, for attention that takes
sequence boundaries from the positions. A batch with `shared` rows runs on those: each prompt once. Only the scored
slots reach the head, in float32.
"""

import copy
import logging
from typing import Literal

import torch
from torch import Tensor, nn

from gruppo.batch.batch import PackedBatch
from gruppo.batch.padded import pad_tokens
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.kernel import reference
from gruppo.kernel.gather import gather_rows, take_rows
from gruppo.kernel.head import Head, best_route
from gruppo.kernel.whole import whole_logps_and_entropy
from gruppo.model.attention import call_keywords, set_shared_attention
from gruppo.model.output import find_output_layer

logger = logging.getLogger(__name__)

HeadChoice = Literal["auto", "walk", "plain"]

SMALL_LOGITS = 1 << 25
"""Up to so many logits (128 MiB) plain autograd holds them all: a walk over windows would cost more than it saves."""


class Scorer:
    """Scores the tokens of a batch under a transformers model (with or without a PEFT adapter in it).

    Args:
        head: "walk" over windows of tokens, "plain" autograd over all logits, or "auto" by size.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        head: HeadChoice = "auto",
    ) -> None:
        reference.check_temperature(temperature)
        self.model = model
        self.temperature = temperature
        self.head: HeadChoice = head
        self.base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
        self.output = find_output_layer(model)
        if self.output is None:
            logger.info("%s: logits come from the whole model, not from body and head", type(model).__name__)
        else:
            logger.info("%s: head=%s, %s when it walks", type(model).__name__, head, best_route(self.output.weight))

    def __call__(self, batch: PackedBatch) -> dict[str, Tensor]:
        """`logps` and `entropies`, `[T]` float32, 0 in slots that are not scored."""
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        labels_N = batch.labels[scored]
        if self.walks(batch.num_slots):  # as the step that trains decides: the two must agree to the bit
            hidden_ND, _, _ = self.hidden(batch)
            logps_N, entropies_N = self.make_head().score(hidden_ND.detach(), labels_N)
        elif self.output is not None and self.output.is_plain_product:
            hidden_ND = self._run_body(batch, scored)
            logps_N, entropies_N = whole_logps_and_entropy(hidden_ND, self.output.weight, labels_N, self.temperature)
        else:
            logits_NV = self._run(self.model, batch, "logits", scored)
            logps_N, entropies_N = reference.logps_and_entropy(logits_NV, labels_N, self.temperature)
        return {"logps": place(logps_N, scored, batch), "entropies": place(entropies_N, scored, batch)}

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits of the scored slots at temperature 1, `[N, V]`, from the hidden states that `__call__` scores."""
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        if self.output is None:
            return self._run(self.model, batch, "logits", scored)
        return self.output.logits(self._run_body(batch, scored))

    def at(self, temperature: float) -> "Scorer":
        """The same scorer at another temperature."""
        reference.check_temperature(temperature)
        other = copy.copy(self)
        other.temperature = temperature
        return other

    def walks(self, num_slots: int) -> bool:
        """Does the head walk over windows for a batch of so many slots?"""
        if self.output is None or self.head == "plain":
            return False
        return self.head == "walk" or num_slots * len(self.output.weight) > SMALL_LOGITS

    def make_head(self) -> Head:
        assert self.output is not None
        return Head(self.output.matrix(), shape=self.output.shape(self.temperature))

    def hidden(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[N, D]` of the scored slots with their graph, labels `[N]`, and which slots they are."""
        assert self.output is not None
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        hidden_ND = self._run_body(batch, scored)
        return self.output.widen(hidden_ND), batch.labels[scored], scored

    def _run_body(self, batch: PackedBatch, scored: Tensor) -> Tensor:
        """Hidden states of the scored slots in the dtype of the head: a body may end in another (Mamba in float32)."""
        assert self.output is not None
        return self._run(self.output.body, batch, "last_hidden_state", scored).to(self.output.weight.dtype)

    def _run(self, module: nn.Module, batch: PackedBatch, output: str, scored: Tensor) -> Tensor:
        """The module's output at the scored slots, `[N, ...]`."""
        if batch.shared is not None:
            set_shared_attention(self.base)
            values_RWD = getattr(module(**call_keywords(batch.shared)), output)
            return gather_rows(values_RWD.flatten(0, 1), batch.shared.slot_of[scored])
        if batch.in_one_row:
            result = module(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
            return take_rows(getattr(result, output)[0], scored)
        rows_SL = pad_tokens(batch.input_ids, batch.cu_seqlens, fill=0)
        row_S = torch.arange(batch.num_sequences, device=batch.labels.device)
        has_repeats = batch.distinct is not None and len(batch.distinct) < batch.num_sequences
        if has_repeats:
            # Equal rows have equal outputs, so one of each kind runs; the backward adds what comes back from copies.
            assert batch.kind is not None
            rows_SL, row_S = rows_SL[batch.distinct], batch.kind
        values_SLD = getattr(module(input_ids=rows_SL, use_cache=False), output)
        # Slot t of the batch is column position_ids[t] of its row.
        row_T = torch.repeat_interleave(row_S, batch.cu_seqlens.diff(), output_size=batch.num_slots)
        index_N = (row_T * rows_SL.shape[1] + batch.position_ids)[scored]
        values_TD = values_SLD.flatten(0, 1)
        return gather_rows(values_TD, index_N) if has_repeats else take_rows(values_TD, index_N)


def place(values_N: Tensor, scored: Tensor, batch: PackedBatch) -> Tensor:
    """Values of the scored slots in the batch's layout, 0 elsewhere, `[T]`."""
    return values_N.new_zeros(batch.num_slots).index_put((scored,), values_N)
