"""How a transformers model gets attention over shared prompts, and which models can have it.

The function is registered with transformers' attention interface and set on the model for good: gradient checkpointing
calls it again in the backward, long after the forward has returned. Without `shared_prompts` in its keywords it is
transformers' SDPA, so samplers and other layouts notice nothing.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.batch import SharedPrompts
from gruppo.kernel.shared_prompt_attention import HAS_TRITON, shared_attention

if HAS_TRITON:
    from gruppo.kernel.triton_decode import decode_attention

logger = logging.getLogger(__name__)

NAME = "gruppo_shared_prompts"
LAYER_TYPES = {"full_attention", "sliding_attention"}


def attend(
    module: nn.Module,
    query: Tensor,  # [R, H, W, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prompts: SharedPrompts | None = None,
    prompt_rows: Any = None,  # a GraphDecoder, or of a compiled block:
    prompt_kv: tuple[Tensor, Tensor] | None = None,
    decode_rows: Any = None,
    decode_kv: tuple[Tensor, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # what a family hands to its attention; SDPA reads some of it
) -> tuple[Tensor, None]:
    """An attention function of transformers: `([R, W, H, D], None)`."""
    if decode_rows is not None:
        decode_kv = decode_rows.layer(module.layer_idx)
    if decode_kv is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return decode_attention(query[:, :, 0], key[:, :, 0], value[:, :, 0], *decode_kv, scaling)[:, None], None  # pyright: ignore
    if prompt_rows is not None:
        prompt_kv = prompt_rows.prompt_layer(module.layer_idx)
    if prompt_kv is not None:
        prompt_kv[0].copy_(key)
        prompt_kv[1].copy_(value)
        attention_mask = None
    if shared_prompts is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
        )
    out = shared_attention(query, key, value, shared_prompts, scale=scaling, window=sliding_window)
    return out.transpose(1, 2).contiguous(), None


def refusal(model: nn.Module) -> str | None:
    """Why this model cannot share prompts, judged by its class and config; None if there is no objection."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "_can_set_attn_implementation"):
        return "it is not a model of transformers"
    text = config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    if not types <= LAYER_TYPES:
        return f"it has layers of {' and '.join(sorted(types - LAYER_TYPES))}"
    if getattr(text, "attention_chunk_size", None):
        return "it has layers of chunked_attention"
    if not model._can_set_attn_implementation():  # type: ignore[operator]  # transformers'
        return "its attention does not go through transformers' attention interface"
    if config._attn_implementation not in ("sdpa", NAME):
        return f"it runs {config._attn_implementation!r} attention; only 'sdpa' can be replaced"
    return None


def set_shared_attention(model: nn.Module) -> None:
    """Let the model's attention read `shared_prompts`. Does nothing the second time."""
    if model.config._attn_implementation == NAME:  # type: ignore[union-attr]
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)  # type: ignore[operator]  # transformers'


def call_keywords(rows: SharedPrompts) -> dict[str, Any]:
    """The keywords with which a model runs on these rows.

    A mask with four axes is handed on as it is, so that transformers makes none of its own; this one is not read.
    """
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.input_ids.device)
    return {
        "input_ids": rows.input_ids,
        "position_ids": rows.position_ids,
        "attention_mask": mask,
        "shared_prompts": rows,
        "use_cache": False,
    }
