"""Decoder blocks of a transformers model: found, and compiled.

A block is one graph, its attention included. All blocks of a model have the same code and share their graphs, whatever
the lengths. What would break a graph stays as it is: transformers' cache, and shared prompts by another route than
tiles. In training the compiler also chooses which activations a block keeps for its backward.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from gruppo.kernel.shared_prompt_attention import best_route

logger = logging.getLogger(__name__)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks: the longest list of modules of one class, one per layer; empty if there is none."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    num = getattr(text, "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num and len({type(block) for block in module}) == 1:
            return list(module)
    return []


class CompiledBlocks:
    """Blocks of a model with compiled forwards. Those that cannot be compiled run as they are, with a line in the log.

    Args:
        keep: share of a block's activations that is kept for the backward; what is cheapest to compute again is not.
        backend: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, *, keep: float = 1.0, backend: str = "inductor") -> None:
        self.name = type(model).__name__
        self.keep = keep
        self.backend = backend
        self.is_on = True
        self.blocks = find_blocks(model)
        # Training, scoring and decoding are a graph each, per layout.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16)
        if not self.blocks:
            logger.info("%s: no list of equal blocks was found; nothing is compiled", self.name)
            return
        if any("forward" in vars(block) for block in self.blocks):
            logger.info("%s: its blocks have forwards of their own; nothing is compiled", self.name)
            return
        self.eager = type(self.blocks[0]).forward
        self.compiled = _compiled(self.eager, keep, backend)
        for i, block in enumerate(self.blocks):
            block.forward = _Forward(self, i, block)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The blocks as they are, for a few tokens that are not worth a graph."""
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on


@cache
def _compiled(forward: FunctionType, keep: float, backend: str) -> Callable[..., Any]:
    """A forward to be compiled for one `keep`. The compiler finds its graphs by the code: each share needs its own."""
    code = forward.__code__.replace(co_name=f"{forward.__name__}_keeping_{keep}")
    own = FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return torch.compile(own, dynamic=True, backend=backend)


class _Forward:
    """Forward of a block: compiled where it can be. An object, not a closure, so that a copy of a model has its own."""

    def __init__(self, blocks: CompiledBlocks, index: int, block: nn.Module) -> None:
        self.blocks, self.index, self.block = blocks, index, block
        self.window = getattr(getattr(block, "self_attn", None), "sliding_window", None)

    def __call__(
        self, hidden_states: Tensor, *args: Any, prompt_rows: Any = None, decode_rows: Any = None, **keywords: Any
    ) -> Any:
        blocks = self.blocks
        # Tensors instead of a number that each block would be compiled for.
        if prompt_rows is not None:
            keywords["prompt_kv"] = prompt_rows.prompt_layer(self.index)
        if decode_rows is not None:
            keywords["decode_kv"] = decode_rows.layer(self.index)
        rows = keywords.get("shared_prompts")
        breaks = rows is not None and best_route(hidden_states, rows, self.window) != "tiles"
        if breaks or not blocks.is_on or keywords.get("past_key_values") is not None:
            return blocks.eager(self.block, hidden_states, *args, **keywords)
        try:
            with torch._functorch.config.patch(activation_memory_budget=blocks.keep):
                return blocks.compiled(self.block, hidden_states, *args, **keywords)
        except (TorchDynamoException, InductorError) as error:
            blocks.is_on = False
            logger.warning("%s: its blocks are not compiled: %s", blocks.name, " ".join(str(error).split())[:300])
            return blocks.eager(self.block, hidden_states, *args, **keywords)
