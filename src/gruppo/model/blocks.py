"""Decoder blocks of a transformers model: found, and compiled.

A block is compiled around its attention, which runs between two graphs: attention over shared prompts has a kernel of
its own. All blocks of a model have the same code and share their graphs, whatever the lengths. Decoding with a cache
stays as it is.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

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
        backend: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.name = type(model).__name__
        self.is_on = True
        self.blocks = find_blocks(model)
        if not self.blocks:
            logger.info("%s: no list of equal blocks was found; nothing is compiled", self.name)
        for i, block in enumerate(self.blocks):
            compiled = torch.compile(block.forward, dynamic=True, backend=backend)
            block.forward = self._either(i, block.forward, compiled)

    def _either(self, index: int, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, decode_rows: Any = None, **keywords: Any) -> Any:
            if decode_rows is not None:  # tensors instead of a number that each block would be compiled for
                keywords["decode_kv"] = decode_rows.layer(index)
            if not self.is_on or keywords.get("past_key_values") is not None:
                return eager(*args, **keywords)
            try:
                return compiled(*args, **keywords)
            except (TorchDynamoException, InductorError) as error:
                self.is_on = False
                logger.warning("%s: its blocks are not compiled: %s", self.name, str(error).strip().split("\n")[0])
                return eager(*args, **keywords)

        return forward
