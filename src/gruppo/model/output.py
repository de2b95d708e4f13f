"""How a model turns hidden states into logits: a weight, maybe a bias, a scale, a soft cap."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gruppo.kernel.reference import at_least_float32
from gruppo.kernel.rows import LogitShape

BIAS_COLUMNS = 8
"""A bias is a column of the weight that meets a 1 in the hidden state; 8 columns keep rows of whole 16-byte pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """logits = cap(scale * (hidden @ weight.T + bias))."""

    body: nn.Module
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def is_plain_product(self) -> bool:
        return self.bias is None and self.scale == 1 and self.soft_cap is None

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def shape(self, temperature: float) -> LogitShape:
        return LogitShape(temperature=temperature, scale=self.scale, soft_cap=self.soft_cap)

    def matrix(self) -> Tensor:
        """The weight with its bias as a column, without graph."""
        weight = self.weight.detach()
        if self.bias is None:
            return weight
        columns = weight.new_zeros(len(weight), BIAS_COLUMNS)
        columns[:, 0] = self.bias.detach()
        return torch.cat([weight, columns], dim=1)

    def widen(self, hidden: Tensor) -> Tensor:
        """Hidden states that `matrix` multiplies."""
        if self.bias is None:
            return hidden
        columns = hidden.new_zeros(len(hidden), BIAS_COLUMNS)
        columns[:, 0] = 1
        return torch.cat([hidden, columns], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 at least, whatever the weight is in."""
        z = at_least_float32(hidden) @ at_least_float32(self.weight).T
        if self.bias is not None:
            z = z + self.bias
        z = z * self.scale
        return z if self.soft_cap is None else (z / self.soft_cap).tanh() * self.soft_cap

    def add_gradient(self, d_matrix: Tensor) -> None:
        """Add the gradient of `matrix` to the parameters it is made of."""
        width = self.weight.shape[1]
        _accumulate(self.weight, d_matrix[:, :width])
        if self.bias is not None:
            _accumulate(self.bias, d_matrix[:, width])


def find_output_layer(model: nn.Module) -> OutputLayer | None:
    """The output layer of a transformers model (with or without a PEFT adapter), or None if it is something else.

    Families differ in what they do to their logits. The config's word on scale and cap is taken as a guess, and what
    decides is a comparison on a few tokens, as they are and blown up so that a cap cannot hide.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
    body = getattr(inner, "base_model", None)
    embeddings = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(body, nn.Module) or body is inner or type(embeddings) is not nn.Linear:
        return None
    scale, soft_cap = _scale_and_cap(inner)
    layer = OutputLayer(
        body=body, weight=embeddings.weight, bias=embeddings.bias, scale=scale, soft_cap=soft_cap
    )  # fmt: skip
    return layer if _agrees(model, embeddings, layer) else None


def _scale_and_cap(model: nn.Module) -> tuple[float, float | None]:
    config = getattr(model, "config", None)
    config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    soft_cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, None if soft_cap is None else float(soft_cap)


@torch.no_grad()
def _agrees(model: nn.Module, embeddings: nn.Linear, layer: OutputLayer) -> bool:
    was_training = model.training
    model.eval()
    tokens = torch.arange(4, device=layer.weight.device)[None] % len(layer.weight)
    hidden: Tensor = layer.body(input_ids=tokens, use_cache=False).last_hidden_state
    product: Tensor = embeddings(hidden.to(layer.weight.dtype))
    tolerance = 2e-2 if layer.weight.element_size() == 2 else 1e-5
    same = True
    for factor in (1, 1000):
        hook = embeddings.register_forward_hook(lambda _module, _inputs, output, by=factor: output * by)  # pyright: ignore[reportOperatorIssue]
        whole = model(input_ids=tokens, use_cache=False).logits
        hook.remove()
        expected = product * factor * layer.scale
        if layer.soft_cap is not None:
            expected = (expected / layer.soft_cap).tanh() * layer.soft_cap
        same = same and whole.shape == expected.shape
        same = same and bool((whole - expected).abs().max() <= tolerance * expected.abs().max())
    model.train(was_training)
    return same


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.requires_grad:
        gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
