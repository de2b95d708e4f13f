"""The sequences of a call as the batches it runs on: which share a forward, and in which layout."""

from collections.abc import Sequence

import torch
from torch import nn

from gruppo.batch import PackedBatch, pack, pack_shared, prompt_groups, split_by_tokens, split_padded, split_shared
from gruppo.batch.shared import own_slots
from gruppo.model.forward import Scorer
from gruppo.model.layout import WORTH_IT, Rows, can_share, rows_for
from gruppo.types import InputFeature


class Batches:
    """Makes the batches that a scorer runs on. No result depends on them: they are for speed and memory."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.device: torch.device = next(scorer.model.parameters()).device
        self.hidden_size = hidden_size(scorer.base)
        self._can_share: bool | None = None

    def make(
        self, features: Sequence[InputFeature], tokens_per_microbatch: int | None
    ) -> list[tuple[list[int], PackedBatch]]:
        """Micro-batches under the budget, each with the indices of its features. None: all in one."""
        rows = self.shared_rows(features)
        batches = []
        for part in self._split(features, tokens_per_microbatch, shares=rows is not None):
            chosen = [features[i] for i in part]
            if rows is None:
                batch = pack(chosen)
            else:
                batch = pack_shared(chosen, row_slots=rows.row_slots, multiple_of=rows.multiple_of)
            batches.append((part, batch.to(self.device)))
        return batches

    def shared_rows(self, features: Sequence[InputFeature]) -> Rows | None:
        """How prompts are shared, or None: when the layout, the estimate or the model is against it."""
        if self.scorer.layout not in ("auto", "shared") or not features or self._can_share is False:
            return None
        rows = rows_for(features, hidden_size=self.hidden_size, is_cuda=self.device.type == "cuda")
        if self.scorer.layout == "auto" and rows.saving < WORTH_IT:
            return None
        if self._can_share is None:  # asked when it first matters: it costs two forwards of a few tokens
            self._can_share = can_share(self.scorer)
        return rows if self._can_share else None

    def _split(self, features: Sequence[InputFeature], budget: int | None, *, shares: bool) -> list[list[int]]:
        if budget is None:
            return [list(range(len(features)))] if features else []
        if shares:
            prompts, own = [len(f.prompt_ids) for f in features], [own_slots(f) for f in features]
            return split_shared(prompt_groups(features), prompts, own, budget)
        lengths = [max(len(f.prompt_ids) + len(f.completion_ids) - 1, 1) for f in features]
        return (split_by_tokens if self.scorer.layout == "packed" else split_padded)(lengths, budget)


def hidden_size(model: nn.Module) -> int:
    """By the config; 1024 where it does not say, which only moves an estimate."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    return int(getattr(text, "hidden_size", 0) or 1024)
