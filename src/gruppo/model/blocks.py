"""Decoder blocks of a transformers model: found, and compiled.

A block is one graph, its attention included. All blocks of a model have the same code and share their graphs, whatever
the lengths. What would break a graph stays as it is: transformers' cache, and shared prompts by another route than
tiles.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
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
        backend: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.name = type(model).__name__
        self.backend = backend
        self.is_on = True
        self.blocks = find_blocks(model)
        # Training, scoring and decoding are a graph each, and the first block of a model with an adapter is another.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16)
        if not self.blocks:
            logger.info("%s: no list of equal blocks was found; nothing is compiled", self.name)
        for i, block in enumerate(self.blocks):
            block.forward = self._either(i, block)

    def _either(self, index: int, block: nn.Module) -> Callable[..., Any]:
        """A forward that runs compiled where it can."""
        eager = block.forward
        compiled = torch.compile(eager, dynamic=True, backend=self.backend)
        window = getattr(getattr(block, "self_attn", None), "sliding_window", None)

        def forward(hidden_states: Tensor, *args: Any, decode_rows: Any = None, **keywords: Any) -> Any:
            if decode_rows is not None:  # tensors instead of a number that each block would be compiled for
                keywords["decode_kv"] = decode_rows.layer(index)
            rows = keywords.get("shared_prompts")
            breaks = rows is not None and best_route(hidden_states, rows, window) != "tiles"
            if breaks or not self.is_on or keywords.get("past_key_values") is not None:
                return eager(hidden_states, *args, **keywords)
            try:
                return compiled(hidden_states, *args, **keywords)
            except (TorchDynamoException, InductorError) as error:
                self.is_on = False
                logger.warning("%s: its blocks are not compiled: %s", self.name, " ".join(str(error).split())[:300])
                return eager(hidden_states, *args, **keywords)

        return forward
