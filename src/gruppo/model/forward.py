"""PackedBatch -> log-probs and entropies of its scored slots.

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
from gruppo.kernel import head, reference

logger = logging.getLogger(__name__)

Layout = Literal["padded", "packed"]


class Scorer:
    """Scores the tokens of a batch under a transformers model (with or without a PEFT adapter in it)."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, layout: Layout = "padded") -> None:
        reference.check_temperature(temperature)
        self.model = model
        self.temperature = temperature
        self.layout = layout
        self.body, self.head_weight = _split(model)
        if self.head_weight is None:
            logger.info("%s: logits come from the whole model, not from body and head", type(model).__name__)

    def __call__(self, batch: PackedBatch) -> dict[str, Tensor]:
        """`logps` and `entropies`, `[T]` float32, 0 in slots that are not scored."""
        scored = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
        labels_N = batch.labels[scored]
        if self.head_weight is None:
            logits_NV = self._run(self.model, batch, "logits")[scored]
            logps_N, entropies_N = reference.logps_and_entropy(logits_NV, labels_N, self.temperature)
        else:
            hidden_ND = self._run(self.body, batch, "last_hidden_state")[scored]
            weight_VD = self.head_weight
            small = labels_N.numel() * len(weight_VD) <= head.LOGITS_PER_CHUNK
            score = reference.linear_logps_and_entropy if small else head.chunked_linear_logps_and_entropy
            logps_N, entropies_N = score(hidden_ND, weight_VD, labels_N, self.temperature)
        return {"logps": _place(logps_N, scored, batch), "entropies": _place(entropies_N, scored, batch)}

    def _run(self, module: nn.Module, batch: PackedBatch, output: str) -> Tensor:
        """The module's output at each slot, `[T, ...]`."""
        if self.layout == "packed":
            result = module(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
            return getattr(result, output)[0]
        rows_SL = pad_tokens(batch.input_ids, batch.cu_seqlens, fill=0)
        values_SLD = getattr(module(input_ids=rows_SL, use_cache=False), output)
        # Slot t of the batch is column position_ids[t] of its row.
        row_T = torch.repeat_interleave(
            torch.arange(batch.num_sequences, device=batch.labels.device),
            batch.cu_seqlens.diff(),
            output_size=batch.num_slots,
        )
        return values_SLD[row_T, batch.position_ids]


def _place(values_N: Tensor, scored: Tensor, batch: PackedBatch) -> Tensor:
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
    blow_up = embeddings.register_forward_hook(lambda _module, _inputs, output: output * 1000)
    with torch.no_grad():
        tokens = torch.arange(4, device=weight.device)[None] % len(weight)
        whole = model(input_ids=tokens, use_cache=False).logits
        blow_up.remove()
        product = (body(input_ids=tokens, use_cache=False).last_hidden_state @ weight.T) * 1000
    model.train(was_training)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    same = whole.shape == product.shape and bool((whole - product).abs().max() <= tolerance * product.abs().max())
    return (body, weight) if same else (model, None)
