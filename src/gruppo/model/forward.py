"""PackedBatch -> hidden states, log-probs and entropies of its scored slots.

The body of the model runs on rows padded on the right: a causal model never looks to the right, so the padding needs
no attention mask and changes nothing. (`layout="packed"` runs one long row instead, for attention kernels that know
sequence boundaries.) Only the scored slots reach the head, in float32.
"""

import logging
from typing import Literal

import torch
from torch import Tensor, nn

from gruppo.batch.batch import PackedBatch
from gruppo.batch.padded import pad_tokens
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.kernel import reference
from gruppo.kernel.gather import take_rows
from gruppo.kernel.head import Head
from gruppo.kernel.rows import LogitShape
from gruppo.kernel.whole import whole_logps_and_entropy

logger = logging.getLogger(__name__)

Layout = Literal["padded", "packed"]
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
        layout: Layout = "padded",
        head: HeadChoice = "auto",
    ) -> None:
        reference.check_temperature(temperature)
        self.model = model
        self.temperature = temperature
        self.layout: Layout = layout
        self.head: HeadChoice = head
        self.body, self.head_weight = _split(model)
        if self.head_weight is None:
            logger.info("%s: logits come from the whole model, not from body and head", type(model).__name__)

    def __call__(self, batch: PackedBatch) -> dict[str, Tensor]:
        """`logps` and `entropies`, `[T]` float32, 0 in slots that are not scored."""
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        labels_N = batch.labels[scored]
        if self.head_weight is None:
            logits_NV = self._run(self.model, batch, "logits", scored)
            logps_N, entropies_N = reference.logps_and_entropy(logits_NV, labels_N, self.temperature)
        else:
            hidden_ND = self._run(self.body, batch, "last_hidden_state", scored)
            if self.walks(batch.num_slots):  # as the step that trains decides: the two must agree to the bit
                logps_N, entropies_N = self.make_head().score(hidden_ND.detach(), labels_N)
            else:
                logps_N, entropies_N = whole_logps_and_entropy(hidden_ND, self.head_weight, labels_N, self.temperature)
        return {"logps": place(logps_N, scored, batch), "entropies": place(entropies_N, scored, batch)}

    def walks(self, num_slots: int) -> bool:
        """Does the head walk over windows for a batch of so many slots?"""
        if self.head_weight is None or self.head == "plain":
            return False
        return self.head == "walk" or num_slots * len(self.head_weight) > SMALL_LOGITS

    def make_head(self) -> Head:
        assert self.head_weight is not None
        return Head(self.head_weight.detach(), shape=LogitShape(temperature=self.temperature))

    def hidden(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[N, D]` of the scored slots with their graph, labels `[N]`, and which slots they are."""
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        return self._run(self.body, batch, "last_hidden_state", scored), batch.labels[scored], scored

    def _run(self, module: nn.Module, batch: PackedBatch, output: str, scored: Tensor) -> Tensor:
        """The module's output at the scored slots, `[N, ...]`."""
        if self.layout == "packed":
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
        return values_TD.index_select(0, index_N) if has_repeats else take_rows(values_TD, index_N)


def place(values_N: Tensor, scored: Tensor, batch: PackedBatch) -> Tensor:
    """Values of the scored slots in the batch's layout, 0 elsewhere, `[T]`."""
    return values_N.new_zeros(batch.num_slots).index_put((scored,), values_N)


def _split(model: nn.Module) -> tuple[nn.Module, Tensor | None]:
    """The body and the head's weight, if the logits are nothing but their product; else (model, None).

    Some families scale or cap their logits, add a bias or adapt the head. Rather than know their names, compare on
    a few tokens, with the head's output blown up so that a cap cannot hide.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
    body = getattr(inner, "base_model", None)
    embeddings = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None  # type: ignore[operator]
    weight = getattr(embeddings, "weight", None)
    if not isinstance(body, nn.Module) or body is inner or not isinstance(weight, Tensor):
        return model, None
    if type(embeddings) is not nn.Linear or embeddings.bias is not None:
        return model, None
    was_training = model.training
    model.eval()
    blow_up = embeddings.register_forward_hook(lambda _module, _inputs, output: output * 1000)  # pyright: ignore[reportOperatorIssue]
    with torch.no_grad():
        tokens = torch.arange(4, device=weight.device)[None] % len(weight)
        whole = model(input_ids=tokens, use_cache=False).logits
        blow_up.remove()
        hidden: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
        product = (hidden @ weight.T) * 1000
    model.train(was_training)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    same = whole.shape == product.shape and bool((whole - product).abs().max() <= tolerance * product.abs().max())
    return (body, weight) if same else (model, None)
