"""The sequences of a call as the batches it runs on: which share a forward, and in which layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from gruppo.batch import PackedBatch, pack, pack_shared, prompt_groups, split_by_tokens, split_padded, split_shared
from gruppo.batch.shared import own_slots
from gruppo.model.forward import Scorer
from gruppo.model.layout import WORTH_IT, Layout, Rows, can_run, rows_for
from gruppo.types import InputFeature


class Batches:
    """Makes the batches that a scorer runs on. No result depends on them: they are for speed and memory."""

    def __init__(self, scorer: Scorer, layout: Layout = "auto") -> None:
        self.scorer = scorer
        self.layout: Layout = layout
        self.device: torch.device = next(scorer.model.parameters()).device
        self.hidden_size = hidden_size(scorer.base)
        self._can_run: bool | None = None

    def make(
        self, features: Sequence[InputFeature], tokens_per_microbatch: int | None
    ) -> list[tuple[list[int], PackedBatch]]:
        """Micro-batches under the budget, each with the indices of its features. None: all in one."""
        rows = self.shared_rows(features)
        in_one_row = bool(features) and self.layout == "packed" and self.can_run("packed")
        batches = []
        for part in self._split(features, tokens_per_microbatch, shares=rows is not None, in_one_row=in_one_row):
            chosen = [features[i] for i in part]
            if rows is None:
                batch = replace(pack(chosen), in_one_row=in_one_row)
            else:
                batch = pack_shared(chosen, row_slots=rows.row_slots, multiple_of=rows.multiple_of)
            batches.append((part, batch.to(self.device)))
        return batches

    def shared_rows(self, features: Sequence[InputFeature]) -> Rows | None:
        """How prompts are shared, or None: when the layout, the estimate or the model is against it."""
        if self.layout not in ("auto", "shared") or not features or self._can_run is False:
            return None
        rows = rows_for(features, hidden_size=self.hidden_size, is_cuda=self.device.type == "cuda")
        if self.layout == "auto" and rows.saving < WORTH_IT:
            return None
        return rows if self.can_run("shared") else None

    def can_run(self, layout: Literal["packed", "shared"]) -> bool:
        """Can the model run the layout that was chosen? Found when it first matters: it costs two small forwards."""
        if self._can_run is None:
            self._can_run = can_run(self.scorer, layout)
        return self._can_run

    def _split(
        self, features: Sequence[InputFeature], budget: int | None, *, shares: bool, in_one_row: bool
    ) -> list[list[int]]:
        if budget is None:
            return [list(range(len(features)))] if features else []
        if shares:
            prompts, own = [len(f.prompt_ids) for f in features], [own_slots(f) for f in features]
            return split_shared(prompt_groups(features), prompts, own, budget)
        lengths = [max(len(f.prompt_ids) + len(f.completion_ids) - 1, 1) for f in features]
        return (split_by_tokens if in_one_row else split_padded)(lengths, budget)


def hidden_size(model: nn.Module) -> int:
    """By the config; 1024 where it does not say, which only moves an estimate."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    return int(getattr(text, "hidden_size", 0) or 1024)
