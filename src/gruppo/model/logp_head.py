"""LogpHead: the output layer of a language model, which can give log-probs of tokens instead of logits.

It stands in the place of the model's `lm_head` and shares its parameters, so whatever wraps the model (an adapter, a
compiler, FSDP's gathering of shards) wraps it too. In a call of the model its weight is there when its forward runs,
and gradients reach it through autograd.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes))
    >>> head = install(model)
    >>> model(input_ids=torch.tensor([[1, 2]])).logits.shape  # as before
    torch.Size([1, 2, 5])
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.dense import dense_logps_and_entropy
from gruppo.kernel.head import Head, HeadResult
from gruppo.kernel.reference import logps_and_entropy

SMALL_LOGITS = 1 << 25
"""Up to this many logits (128 MiB) are held at once: a walk over windows would cost more than it saves."""
BIAS_COLUMNS = 8
"""A bias is a column of the weight that meets a 1 in the hidden state; 8 columns keep rows of whole 16-byte pieces."""

Train = Callable[[Head, Tensor, Tensor, bool], tuple[HeadResult, Tensor]]
"""(head, hidden states, labels, whether the weight trains) -> log-probs and gradients of a loss, and the loss."""


@dataclass(slots=True)
class HeadCall:
    """What the next forward of a head shall do, and what came of it."""

    take: Callable[[Tensor], Tensor]
    """Hidden states `[B, L, D]` to those of the scored tokens, `[N, D]`."""
    labels: Tensor  # [N]
    temperature: float
    walks: bool
    """Window by window, and not all logits at once."""
    gives_logits: bool = False
    """Logits instead of log-probs."""
    train: Train | None = None
    """For a walk that trains: computes the loss."""
    logits: Tensor | None = None  # [N, V]
    logps: Tensor | None = None  # [N]
    entropies: Tensor | None = None  # [N]
    loss: Tensor | None = None  # [] with gradient
    """Of a walk that trains."""


class LogpHead(nn.Linear):
    """`logits = cap(scale * (hidden @ weight.T + bias))`, or log-probs of tokens under them."""

    scale: float = 1.0
    soft_cap: float | None = None
    call: HeadCall | None = None

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
        call = self.call
        if call is None:
            # Mamba's body ends in float32 whatever its weights are in.
            return super().forward(input if input.dtype == self.weight.dtype else input.to(self.weight.dtype))
        hidden_ND = call.take(input)
        if call.gives_logits:
            call.logits = self._logits(hidden_ND)
        elif not call.walks:
            call.logps, call.entropies = self._dense(hidden_ND, call)
        elif call.train is None:
            head, wide_ND = self._walk(call.temperature, hidden_ND.detach())
            call.logps, call.entropies = head.score(wide_ND, call.labels)
        else:
            call.loss = _Walk.apply(hidden_ND, self.weight, self.bias, self, call)  # type: ignore[assignment]
        return input.new_zeros(1, 1, 1)  # the model may scale or cap it; nobody reads it

    def _dense(self, hidden_ND: Tensor, call: HeadCall) -> tuple[Tensor, Tensor]:
        if self.bias is None and self.scale == 1 and self.soft_cap is None:
            return dense_logps_and_entropy(hidden_ND, self.weight, call.labels, call.temperature)
        return logps_and_entropy(self._logits(hidden_ND), call.labels, call.temperature)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits as the model makes them, scaled and capped."""
        logits_NV = nn.functional.linear(hidden_ND.to(self.weight.dtype), self.weight, self.bias)
        logits_NV = logits_NV * self.scale if self.scale != 1 else logits_NV
        return logits_NV if self.soft_cap is None else (logits_NV / self.soft_cap).tanh() * self.soft_cap

    def _walk(self, temperature: float, hidden_ND: Tensor) -> tuple[Head, Tensor]:
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
    def forward(ctx, hidden_ND, weight, bias, module: LogpHead, call: HeadCall) -> Tensor:
        assert call.train is not None
        head, wide_ND = module._walk(call.temperature, hidden_ND)
        trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        result, loss = call.train(head, wide_ND, call.labels, trains)
        call.logps, call.entropies = result.logps, result.entropies
        ctx.width, ctx.dtype, ctx.result = hidden_ND.shape[1], hidden_ND.dtype, result
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
        return result.d_hidden[:, :width].to(ctx.dtype), d_weight, d_bias, None, None


def install(model: nn.Module) -> LogpHead | None:
    """Put a LogpHead in the place of a transformers model's output layer; None if that is not a plain linear layer.

    Families differ in what they do to their logits. The config's word on scale and cap is taken as a guess, and what
    decides is a comparison on a few tokens, as they are and blown up so that a cap cannot hide.
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
    if inner.get_output_embeddings() is head and _agrees(model, head):
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
    tolerance = 2e-2 if head.weight.element_size() == 2 else 1e-5
    same = True
    for factor in (1, 1000):
        seen: list[Tensor] = []

        def blow_up(_module: nn.Module, _inputs: Any, output: Tensor, seen=seen, factor=factor) -> Tensor:
            seen.append(output * factor)
            return seen[0]

        hook = head.register_forward_hook(blow_up)
        whole = model(input_ids=tokens, use_cache=False).logits
        hook.remove()
        expected = seen[0] * head.scale
        if head.soft_cap is not None:
            expected = (expected / head.soft_cap).tanh() * head.soft_cap
        same = same and len(seen) == 1 and whole.shape == expected.shape
        same = same and bool((whole - expected).abs().max() <= tolerance * expected.abs().max())
    model.train(was_training)
    return same
