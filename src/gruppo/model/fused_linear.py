"""Linear layers of a block that read the same input, as one product while tokens are decoded.

A product with a few hundred rows takes hardly longer than its launch, so that one for queries, keys and values takes
little more than a third of three. The weights of such layers lie one behind the other in memory, and each parameter is
its part of it: nothing is held twice, and training has its parameters as before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.model.compiled_blocks import find_blocks

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that families give to those that read one input, in the order of their calls."""


@contextmanager
def joined_products(model: nn.Module) -> Iterator[None]:
    """The blocks of a model with one product for layers of one input. Layers that it cannot join stay as they are."""
    products = [Product(layers) for block in find_blocks(model) for layers in _layers_of_one_input(block)]
    try:
        for product in products:
            for i, layer in enumerate(product.layers):
                # A class, because the compiler shares graphs between objects of one class, not between functions.
                vars(layer).update(product=product, index=i)
                layer.__class__ = _Part
        yield
    finally:
        for product in products:
            for layer in product.layers:
                layer.__class__ = nn.Linear
                for name in ("product", "index"):
                    del vars(layer)[name]


def _layers_of_one_input(block: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in block.modules():
        children = dict(module.named_children())
        for names in TOGETHER:
            if not children.keys() >= set(names):
                continue
            layers = [getattr(children[name], "base_layer", children[name]) for name in names]  # below an adapter
            if all(map(_is_plain, layers)) and len({(x.in_features, x.bias is None) for x in layers}) == 1:
                yield layers  # type: ignore[misc]


def _is_plain(layer: object) -> bool:
    """A linear layer that is nothing else: not in few bits, not a shard."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


class Product:
    """The product of one input with the weights of several layers, of which each layer takes its part.

    The first layer computes it. Another that is called with another input computes its own.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.weight = side_by_side([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else side_by_side([layer.bias for layer in layers])
        ends = accumulate(len(layer.weight) for layer in layers)
        self.columns = [slice(end - len(layer.weight), end) for layer, end in zip(layers, ends, strict=True)]
        self.input: Tensor | None = None
        self.output: Tensor | None = None


class _Part(nn.Linear):
    """A layer that takes its part of a product."""

    product: Product
    index: int

    def forward(self, input: Tensor) -> Tensor:
        product, index = self.product, self.index
        if index == 0:
            product.input, product.output = input, F.linear(input, product.weight, product.bias)
        elif product.input is not input:
            return super().forward(input)
        assert product.output is not None
        return product.output[..., product.columns[index]]


@torch.inference_mode(False)
@torch.no_grad()
def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """The rows of all parameters as one tensor, of which the parameters are parts from then on."""
    sizes = [len(parameter) for parameter in parameters]
    if not _are_side_by_side(parameters):
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
    first = parameters[0].data
    return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())


def _are_side_by_side(parameters: Sequence[Tensor]) -> bool:
    at, memory = parameters[0].data_ptr(), parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        is_next = parameter.data_ptr() == at and parameter.untyped_storage().data_ptr() == memory
        if not is_next or not parameter.is_contiguous():
            return False
        at += parameter.nbytes
    return True
