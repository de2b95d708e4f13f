"""LogpModel: log-probs and entropies of a batch's scored tokens, and the gradient of a loss of them.

The model runs on rows padded on the right: a causal model never looks to the right, so the padding needs no attention
mask and changes nothing. A batch `in_one_row` runs as one long row instead, for attention that takes sequence
boundaries from the positions. A batch with `shared` rows runs on those: each prompt once. Only the scored slots reach
the head, in float32.

LogpHead stands in the place of the model's `lm_head` and shares its parameters, so whatever wraps the model (an
adapter, a compiler, FSDP's gathering of shards) wraps it too. In a call of the model its weight is there when its
forward runs, and gradients reach it through autograd.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes))
    >>> head = install(model)
    >>> model(input_ids=torch.tensor([[1, 2]])).logits.shape  # as before
    torch.Size([1, 2, 5])
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gruppo.batch import PackedBatch, Totals
from gruppo.batch.packed import pad_tokens
from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.head import Head, HeadResult, best_route
from gruppo.kernel.index import take_repeated, take_unique
from gruppo.kernel.logps import check_temperature, dense_logps_and_entropy, logps_and_entropy
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.model.attention_hook import call_keywords, set_shared_attention

if TYPE_CHECKING:
    from gruppo.model.compiled_blocks import CompiledBlocks
    from gruppo.model.decoder import GraphDecoder

logger = logging.getLogger(__name__)

HeadChoice = Literal["auto", "walk", "dense"]

SMALL_LOGITS = 1 << 25
"""Up to this many logits (128 MiB) are held at once: a walk over windows would cost more than it saves."""
BIAS_COLUMNS = 8
"""A bias is a column of the weight that meets a 1 in the hidden state; 8 columns keep rows of whole 16-byte pieces."""


class LogpModel:
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
        self.is_half = next(model.parameters()).element_size() == 2
        """Whether the model computes in half precision."""
        self.compiled: CompiledBlocks | None = None
        self.decoded: set[tuple[torch.Size, ...]] = set()
        """Shapes of caches for which a step of decoding has run."""
        self.decoder: GraphDecoder | None = None
        """The decoder of the last call, if it is worth its memory."""
        self.head = install(model)
        if self.head is None:
            logger.info("%s: logits come from the model as it is, not from a head of ours", type(model).__name__)
        else:
            route = best_route(self.head.weight).name
            logger.info("%s: head=%s, %s when it walks", type(model).__name__, head, route)

    def try_head(self) -> None:
        """Compare our head with the model's logits, once weights are there that were missing when it was made."""
        if self.head is not None and not _agrees(self.model, self.head):
            self.head = None  # it stays in the model, as the linear layer that it is

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the scored tokens, `[N]` float32."""
        head, labels_N, temperature = self.head, batch.labels[batch.scored], self.temperature
        if head is None:
            return logps_and_entropy(self.logits(batch), labels_N, temperature)
        read = head.score if self.walks(batch.num_slots) else head.logps_and_entropy
        return self.read(*self._keywords(batch), lambda hidden_ND: read(hidden_ND, labels_N, temperature))

    def loss_of(self, batch: PackedBatch, loss: PolicyLoss, totals: Totals) -> tuple[LossOutput, LossInputs]:
        """The loss of a batch, with its gradient still to be taken, and what it was computed on."""
        head = self.head
        if head is None or not self.walks(batch.num_slots):
            inputs = LossInputs.of(batch, *self(batch), totals)
            return loss.compute(inputs), inputs

        def inputs_of(dtype: torch.dtype) -> LossInputs:
            blank = torch.zeros(len(batch.scored), dtype=dtype, device=batch.scored.device)
            return LossInputs.of(batch, blank, None, totals)

        walk = LossWalk(loss, inputs_of, batch.lengths)
        more = (head, walk, batch.labels[batch.scored], self.temperature)
        keywords, take = self._keywords(batch)
        total = self.read(keywords, take, lambda hidden_ND: _Walk.apply(hidden_ND, head.weight, head.bias, *more))
        inputs, result = walk.inputs, walk.result
        assert result is not None
        output = LossOutput(
            loss=total, terms=walk.terms, means=walk.means, on_policy=inputs.on_policy, rejected=walk.rejected
        )
        old = result.logps if inputs.on_policy else inputs.old_logps
        return output, replace(inputs, logps=result.logps, old_logps=old, entropies=result.entropies)

    def body(self, batch: PackedBatch) -> Tensor:
        """Hidden states of the scored slots, `[N, D]`, or logits where the head is the model's own."""
        return self.read(*self._keywords(batch), lambda hidden_ND: hidden_ND)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits of the scored slots at temperature 1, `[N, V]`, from the hidden states that are scored."""
        return self.read(*self._keywords(batch), None if self.head is None else self.head.logits)

    def at(self, temperature: float) -> "LogpModel":
        """The same at another temperature."""
        check_temperature(temperature)
        other = copy.copy(self)
        other.temperature = temperature
        return other

    def walks(self, num_slots: int) -> bool:
        """Does the head walk over windows for a batch of this many slots? Scoring and training decide alike."""
        if self.head is None or self.choice == "dense":
            return False
        return self.choice == "walk" or num_slots * self.head.out_features > SMALL_LOGITS

    def read(
        self, keywords: dict[str, Any], take: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any] | None
    ) -> Any:
        """Call the model; what `read` makes of the hidden states that `take` chooses. Without a head: their logits."""
        found: list[Any] = []
        if self.head is not None and read is not None:
            self.head.reader = lambda hidden: found.append(read(take(hidden)))
        try:
            result = self.model(**keywords)
        finally:
            if self.head is not None:
                self.head.reader = None
        if hasattr(self.model, "reshard") and not torch.is_grad_enabled():
            # FSDP gathers the outermost weights for a backward that will not come; its parameters would be others.
            self.model.reshard()  # type: ignore[operator]
        return take(result.logits) if self.head is None else found[0]

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
        rows_SL = pad_tokens(batch.input_ids, batch.cu_seqlens, fill=0, rounds=batch.labels.is_cuda)
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
    means: dict[str, Tensor] = field(default_factory=dict)
    rejected: Tensor | None = None
    result: HeadResult | None = None
    _dtype: torch.dtype = torch.float32
    _inputs: LossInputs | None = None
    _total: Tensor | None = None

    @property
    def inputs(self) -> LossInputs:
        """Made at the first window, while the GPU is busy with its product."""
        if self._inputs is None:
            self._inputs = self.make_inputs(self._dtype)
        return self._inputs

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor, trains: bool) -> tuple[HeadResult, Tensor]:
        """Log-probs and gradients, and the loss; `trains`: whether the output weight gets a gradient."""
        self._dtype = head.dtype
        self.result = head.train(
            hidden,
            labels,
            self._gradient,
            lengths=None if self.loss.is_per_token else self.lengths,
            needs_weight=trains,
            entropy_gradient=self.loss.differentiates_entropies,
        )
        total = torch.zeros((), dtype=head.dtype, device=hidden.device) if self._total is None else self._total
        return self.result, total

    def _gradient(self, rows: slice, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        if rows.start == 0:  # a walk that left a route's range begins again
            self.terms, self.means, self.rejected, self._total = {}, {}, None, None
        logps = logps.detach().requires_grad_()
        wants_entropy = self.loss.differentiates_entropies
        entropies = entropies.detach().requires_grad_(wants_entropy)
        output = self.loss.compute(self.inputs.window(rows, logps, entropies))
        wanted = (logps, entropies) if wants_entropy else (logps,)
        grads = torch.autograd.grad(output.loss, wanted, allow_unused=True)
        self._total = _plus(self._total, output.loss.detach())
        for sums, values in ((self.terms, output.terms), (self.means, output.means)):
            for name, value in values.items():
                sums[name] = _plus(sums.get(name), value)
        if output.rejected is not None:
            self.rejected = _plus(self.rejected, output.rejected)
        grad_logps = torch.zeros_like(logps) if grads[0] is None else grads[0]
        return grad_logps, grads[1] if wants_entropy else None


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value


# --- the head ---------------------------------------------------------------------------------------------------------


class LogpHead(nn.Linear):
    """`logits = cap(scale * (hidden @ weight.T + bias))`, or what `reader` makes of the hidden states."""

    scale: float = 1.0
    soft_cap: float | None = None
    reader: Callable[[Tensor], Any] | None = None
    """Set for one call of the model: is given the hidden states `[B, L, D]`; no logits are computed then."""

    @classmethod
    def over(cls, linear: nn.Linear) -> "LogpHead":
        """A head with the parameters of a linear layer."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        head.train(linear.training)
        return head

    def forward(self, input: Tensor) -> Tensor:
        if self.reader is None:
            # Mamba's body ends in float32 whatever its weights are in.
            return super().forward(input if input.dtype == self.weight.dtype else input.to(self.weight.dtype))
        self.reader(input)
        return input.new_zeros(1, 1, 1)  # the model may scale or cap it; it is not read

    def logps_and_entropy(self, hidden_ND: Tensor, labels_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, all logits at once."""
        if self.bias is None and self.scale == 1 and self.soft_cap is None:
            return dense_logps_and_entropy(hidden_ND, self.weight, labels_N, temperature)
        return logps_and_entropy(self.logits(hidden_ND), labels_N, temperature)

    def score(self, hidden_ND: Tensor, labels_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies without gradients, window by window."""
        head, wide_ND = self.walk(hidden_ND.detach(), temperature)
        return head.score(wide_ND, labels_N)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits as the model makes them, scaled and capped."""
        return self.shaped(nn.functional.linear(hidden_ND.to(self.weight.dtype), self.weight, self.bias))

    def shaped(self, logits: Tensor) -> Tensor:
        """What the model makes of the layer's output: scaled, then capped."""
        logits = logits * self.scale if self.scale != 1 else logits
        return logits if self.soft_cap is None else (logits / self.soft_cap).tanh() * self.soft_cap

    def walk(self, hidden_ND: Tensor, temperature: float) -> tuple[Head, Tensor]:
        """The walk over windows, and hidden states for it; a bias becomes a column of the weight."""
        weight = self.weight.detach()
        hidden_ND = hidden_ND.to(weight.dtype)
        if self.bias is not None:
            columns = weight.new_zeros(len(weight), BIAS_COLUMNS)
            columns[:, 0] = self.bias.detach()
            weight = torch.cat([weight, columns], dim=1)
            ones = hidden_ND.new_zeros(len(hidden_ND), BIAS_COLUMNS)
            ones[:, 0] = 1
            hidden_ND = torch.cat([hidden_ND, ones], dim=1)
        shape = LogitShape(temperature=temperature, scale=self.scale, soft_cap=self.soft_cap)
        return Head(weight, shape=shape), hidden_ND


class _Walk(torch.autograd.Function):
    """The loss of a walk over windows. Its gradients are computed in the forward; the backward hands them out."""

    @staticmethod
    def forward(ctx, hidden_ND, weight, bias, head: LogpHead, walk: LossWalk, labels_N, temperature) -> Tensor:
        windows, wide_ND = head.walk(hidden_ND, temperature)
        trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.result, loss = walk(windows, wide_ND, labels_N, trains)
        ctx.width, ctx.dtype = hidden_ND.shape[1], hidden_ND.dtype
        return loss

    @staticmethod
    def backward(ctx, _):  # type: ignore[override]
        # The gradient that comes in is 1: the backward starts here. Multiplying by it would be a pass over d_weight.
        result, width = ctx.result, ctx.width
        ctx.result = None
        d_weight = d_bias = None
        if result.d_weight is not None:
            d_weight = result.d_weight[:, :width] if ctx.needs_input_grad[1] else None
            d_bias = result.d_weight[:, width] if ctx.needs_input_grad[2] else None
        return result.d_hidden[:, :width].to(ctx.dtype), d_weight, d_bias, None, None, None, None


def install(model: nn.Module) -> LogpHead | None:
    """Put a LogpHead in the place of a transformers model's output layer; None if that is not a plain linear layer.

    Families differ in what they do to their logits. The config's word on scale and cap is taken as a guess, and what
    decides is a comparison on a few tokens, as they are and blown up so that a cap cannot hide. Without weights (on the
    meta device) it is still to be made, by `LogpModel.try_head`.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
    linear = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if isinstance(linear, LogpHead):
        return linear
    if type(linear) is not nn.Linear or not hasattr(inner, "set_output_embeddings"):
        return None
    head = LogpHead.over(linear)
    head.scale, head.soft_cap = _scale_and_cap(inner)
    inner.set_output_embeddings(head)
    if inner.get_output_embeddings() is head and (head.weight.is_meta or _agrees(model, head)):
        return head
    inner.set_output_embeddings(linear)
    return None


def _scale_and_cap(model: Any) -> tuple[float, float | None]:
    config = getattr(model, "config", None)
    config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    soft_cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, None if soft_cap is None else float(soft_cap)


@torch.no_grad()
def _agrees(model: nn.Module, head: LogpHead) -> bool:
    """Do the model's logits follow from what reaches its head, as the head believes?"""
    was_training = model.training
    model.eval()
    tokens = torch.arange(4, device=head.weight.device)[None] % len(head.weight)
    same = True
    for factor in (1, 1000):
        seen: list[Tensor] = []

        def blow_up(_module: nn.Module, _inputs: Any, output: Tensor, seen=seen, factor=factor) -> Tensor:
            seen.append(output * factor)
            return seen[0]

        hook = head.register_forward_hook(blow_up)
        whole = model(input_ids=tokens, use_cache=False).logits
        hook.remove()
        expected = head.shaped(seen[0])
        # Sharded weights may be kept in float32 and compute in half precision.
        tolerance = 2e-2 if 2 in (head.weight.element_size(), whole.element_size()) else 1e-5
        same = same and len(seen) == 1 and whole.shape == expected.shape
        same = same and bool((whole - expected).abs().max() <= tolerance * expected.abs().max())
    model.train(was_training)
    if hasattr(model, "reshard"):
        model.reshard()  # type: ignore[operator]  # FSDP's
    return same
