"""Rows of tokens that grow by a token at a time, and the logits of what follows them.

    CachedRows      keep keys, values and recurrent states in transformers' cache: one token per row and step
    RecomputedRows  keep tokens only: the trainer's own forward over whole rows in every step

Log-probs of sampled tokens must be those that the trainer computes. With plain attention a cache gives them. A model
with other layers is compared with the trainer's scoring first; `find_way` decides how it decodes.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from gruppo.types import InputFeature

logger = logging.getLogger(__name__)

Way = Literal["together", "by length", "recomputed"]
"""With a cache, all prompts padded to one length; with a cache, prompts of one length at a time; without a cache."""


class DecodedModel(Protocol):
    """The trainer's model as decoding uses it: `gruppo.model.TransformersModel`, or another of its kind."""

    model: Any
    """A causal language model of transformers, bare or with a PEFT adapter."""
    tokenizer: Any
    device: torch.device
    version: int

    def forward_only(
        self, inputs: Sequence[InputFeature], *, temperature: float | None = None
    ) -> dict[str, list[Tensor]]: ...

    def next_logits(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Logits of the token after each row, `[N, V]` float32."""
        ...


class CachedRows:
    """Rows in a cache. `logits_CV` follow each of its `C` rows; at first these are the prompts, padded on the left."""

    is_cheap_to_cut = False

    def __init__(self, model: DecodedModel, prompts: Sequence[tuple[int, ...]]) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import CacheLayerMixin

        self.model = model.model
        self.device = model.device
        self.cache = DynamicCache(config=self.model.config)
        self.cache_name = _cache_name(model) or "past_key_values"
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        length_P = torch.tensor(lengths, device=self.device)
        column_L = torch.arange(longest, device=self.device)
        position_PL = (column_L[None] - (longest - length_P)[:, None]).clamp(min=0)
        # Prompts of one length need no mask, and attention is faster without one.
        self.attention: Tensor | None = None
        if min(lengths) != longest:
            self.attention = (column_L[None] >= (longest - length_P)[:, None]).long()
        self.logits_CV = self._forward(ids, position_PL)
        self.position_C = length_P - 1
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.cache.layers):
            self.attention = None  # only keys have to be masked again; a recurrence has the padding behind it

    def advance(self, keep: np.ndarray | None, tokens: np.ndarray) -> None:
        """Keep these rows of the cache, in this order and maybe several times (None: all), and append a token to each.

        `reorder_cache` is the one selection that every kind of layer has.
        """
        if keep is not None:
            rows = torch.from_numpy(keep).to(self.device)
            self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # a LongTensor to transformers
            self.position_C = self.position_C[rows]
            self.attention = None if self.attention is None else self.attention[rows]
        if self.attention is not None:
            self.attention = torch.cat([self.attention, self.attention.new_ones(len(self.attention), 1)], 1)
        self.position_C = self.position_C + 1
        self.logits_CV = self._forward(torch.from_numpy(tokens).to(self.device)[:, None], self.position_C[:, None])

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        outputs = self.model(
            input_ids=ids,
            attention_mask=self.attention,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        return outputs.logits[:, -1].float()


class RecomputedRows:
    """Rows without a cache, each distinct one run whole in every step, as the trainer runs it."""

    is_cheap_to_cut = True

    def __init__(self, model: DecodedModel, prompts: Sequence[tuple[int, ...]]) -> None:
        self.model = model
        self.rows = list(prompts)
        self.logits_CV = self.model.next_logits(self.rows)

    def advance(self, keep: np.ndarray | None, tokens: np.ndarray) -> None:
        rows = self.rows if keep is None else [self.rows[i] for i in keep]
        self.rows = [(*row, token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        self.logits_CV = self.model.next_logits(self.rows)


# --- which of them a model needs ----------------------------------------------------------------------------------


def find_way(model: DecodedModel) -> Way:
    """The way a model decodes: with a cache for plain attention, else decided by a comparison with the trainer."""
    if _has_plain_attention(model):
        return "together"
    name = type(_base(model)).__name__
    features = _pairs(model)
    expected = torch.cat(model.forward_only(features, temperature=1.0)["logps"])
    alone = torch.cat([model.forward_only([f], temperature=1.0)["logps"][0] for f in features])
    is_half = next(model.model.parameters()).element_size() == 2
    # Rounding is measured: what the trainer's own numbers differ by, in one batch and one by one. A recurrence that is
    # slightly off drifts with every token, so that what is small here is not after a thousand.
    tolerance = max(10 * float((alone - expected).abs().max()), 0.2 if is_half else 1e-4)
    padded = _disagreement(model, [features], expected, tolerance)
    if padded is None:
        return "together"
    reason = _disagreement(model, [features[i : i + 2] for i in range(0, len(features), 2)], expected, tolerance)
    if reason is None:
        logger.warning("%s: prompts are sampled one length at a time, since padded to one %s", name, padded)
        return "by length"
    logger.warning("%s: sampling runs without a cache, a whole forward per token, since with one %s", name, reason)
    return "recomputed"


def _base(model: DecodedModel) -> Any:
    """The transformers model inside a PEFT adapter, or the model itself."""
    return model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model


def _has_plain_attention(model: DecodedModel) -> bool:
    """Whether the cache holds keys and values, of all tokens or of a window, and nothing else."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    base = _base(model)
    if _cache_name(model) != "past_key_values" or getattr(base, "_is_stateful", False):
        return False  # transformers calls stateful what keeps a state, be it in the cache or in the model
    try:
        layers = DynamicCache(config=base.config).layers
    except KeyError:  # a kind of layer that transformers has no cache for
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _cache_name(model: DecodedModel) -> str | None:
    """The keyword under which the model takes a cache."""
    taken = inspect.signature(_base(model).forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in taken), None)


def _pairs(model: DecodedModel) -> list[InputFeature]:
    """Two sequences for each of three prompts of unequal length; like samples of a group they part after the prompt."""
    vocabulary = _base(model).config.get_text_config().vocab_size
    prompts = [(7, 14, 5, 12, 3, 10, 1, 8, 15), (6, 13, 4, 11), (2, 9)]
    return [
        InputFeature(
            prompt_ids=tuple(token % vocabulary for token in prompt),
            completion_ids=tuple((len(prompt) + 5 * sample + 3 * j) % vocabulary for j in range(24)),
        )
        for prompt in prompts
        for sample in range(2)
    ]


def _disagreement(
    model: DecodedModel, batches: Sequence[Sequence[InputFeature]], expected: Tensor, tolerance: float
) -> str | None:
    """Why a cache does not give the expected log-probs of these pairs; None when it does."""
    try:
        cached = torch.cat([_cached_logps(model, pairs) for pairs in batches])
    except Exception as error:  # whatever a model raises that takes no such cache
        return f"it fails with {type(error).__name__}: {error}"
    gap = float((cached - expected).abs().max())
    return None if gap <= tolerance else f"its log-probs differ by {gap:.2g}"


def _cached_logps(model: DecodedModel, pairs: Sequence[InputFeature]) -> Tensor:
    """Log-probs of the given tokens, decoded one by one, sequence after sequence."""
    rows = CachedRows(model, [f.prompt_ids for f in pairs[::2]])
    home = np.repeat(np.arange(len(pairs) // 2), 2)
    logps = []
    for tokens in np.array([f.completion_ids for f in pairs]).T:
        logps.append(rows.logits_CV.log_softmax(-1)[torch.from_numpy(home), torch.from_numpy(tokens)])
        rows.advance(home, tokens)
        home = np.arange(len(pairs))
    return torch.stack(logps, 1).flatten()
