"""A prompt is computed once per group: the rows that the body of a model runs on when completions share a prompt.

`PackedBatch` keeps one slot per token of every sequence; losses, metrics and the head see nothing else. Here is only
what the *body* computes, and `slot_of` says which computed slot holds the hidden state of which slot of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from gruppo.batch.batch import PackedBatch
from gruppo.batch.microbatch import split_shared
from gruppo.batch.pack import pack
from gruppo.types import InputFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """Rows of W slots: first the prompts of the row, one each, then the completions.

    Prompt [5, 6] with completions [7, 8, 2] and [9, 2] (a completion's last token predicts nothing and has no slot):

        slot           0   1  |  2   3  |  4
        input_ids      5   6  |  7   8  |  9
        position_ids   0   1  |  2   3  |  2
        own_start      0   0     2   2     4
        prompt_start   0   0     0   0     0
        prompt_stop    0   0     2   2     2

    A slot q may look at the slots `own_start[q]..q` of its own segment and at `prompt_start[q]..prompt_stop[q] - 1`,
    the prompt of its group; for a slot of a prompt the second range is empty. Padding looks at itself only.
    """

    input_ids: Tensor  # [R, W] int64
    position_ids: Tensor  # [R, W] int64
    own_start: Tensor  # [R, W] int32
    prompt_start: Tensor  # [R, W] int32
    prompt_stop: Tensor  # [R, W] int32
    slot_of: Tensor  # [T] int64: for each slot of the packed batch its slot in the flattened rows
    num_slots: int  # slots without padding
    masks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What attention kernels made of the ranges, once for all layers."""

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    @property
    def row_length(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device | str) -> "SharedPrompts":
        moved: dict[str, Any] = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, masks={}, **moved)


def prompt_groups(features: Sequence[InputFeature]) -> list[int]:
    """Which group each feature belongs to: those whose prompts are equal token by token, wherever they stand.

    >>> first, other = (InputFeature(prompt_ids=ids, completion_ids=(7,)) for ids in ((5, 6), (5, 7)))
    >>> prompt_groups([first, other, first])
    [0, 1, 0]
    """
    groups: dict[tuple[int, ...], int] = {}
    return [groups.setdefault(f.prompt_ids, len(groups)) for f in features]


def own_slots(feature: InputFeature) -> int:
    """Slots that a sequence needs beside its prompt's: its completion but the last token."""
    return max(len(feature.completion_ids) - 1, 0)


def pack_shared(features: Sequence[InputFeature], *, row_slots: int | None = None, multiple_of: int = 1) -> PackedBatch:
    """As `pack`, with the rows in which the body computes each prompt once, and equal sequences once.

    Args:
        row_slots: how long a row may get; a group that is longer is split, and its prompt repeated in each part.
            None: one row for everything.
        multiple_of: rows are padded to a multiple of this many slots.
    """
    batch = pack(features)
    assert batch.distinct is not None and batch.kind is not None
    computed = [features[i] for i in batch.distinct.tolist()]
    groups = prompt_groups(computed)
    if row_slots is None:
        parts = [list(range(len(computed)))]
    else:
        parts = split_shared(groups, [len(f.prompt_ids) for f in computed], [own_slots(f) for f in computed], row_slots)
    rows = [_Row([computed[i] for i in part], [groups[i] for i in part]) for part in parts]
    longest = max((len(row.input_ids) for row in rows), default=0)
    width = -(-longest // multiple_of) * multiple_of
    slots: list[list[int]] = [[] for _ in computed]
    for r, (part, row) in enumerate(zip(parts, rows, strict=True)):
        for i, (prompt, own) in zip(part, row.places, strict=True):
            slots[i] = _slots_of(computed[i], r * width + prompt, r * width + own)
    return replace(
        batch,
        shared=SharedPrompts(
            input_ids=_rows([row.input_ids for row in rows], width),
            position_ids=_rows([row.position_ids for row in rows], width),
            own_start=_rows([row.own_start for row in rows], width, torch.arange(width)).to(torch.int32),
            prompt_start=_rows([row.prompt_start for row in rows], width).to(torch.int32),
            prompt_stop=_rows([row.prompt_stop for row in rows], width).to(torch.int32),
            slot_of=torch.tensor([s for k in batch.kind.tolist() for s in slots[k]], dtype=torch.int64),
            num_slots=sum(len(row.input_ids) for row in rows),
        ),
    )


class _Row:
    """One row: the tensors over its slots, and where the prompt and the own slots of each sequence start."""

    def __init__(self, features: list[InputFeature], groups: list[int]) -> None:
        prompts = dict(zip(groups, (f.prompt_ids for f in features), strict=True))
        tokens: list[int] = []
        first: dict[int, int] = {}
        for group, prompt in prompts.items():
            first[group] = len(tokens)
            tokens += prompt
        lengths = [len(prompt) for prompt in prompts.values()]
        ranges = [(0, 0, 0)] * len(prompts)  # of a segment: position of its first slot, start and stop of its prompt
        self.places: list[tuple[int, int]] = []
        for feature, group in zip(features, groups, strict=True):
            start, prompt = first[group], len(prompts[group])
            self.places.append((start, len(tokens)))
            tokens += feature.completion_ids[:-1]
            lengths.append(own_slots(feature))
            ranges.append((prompt, start, start + prompt))
        length_K = torch.tensor(lengths, dtype=torch.int64)
        start_K = length_K.cumsum(0) - length_K
        position_K, prompt_start_K, prompt_stop_K = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3).unbind(1)
        spread = [x.repeat_interleave(length_K) for x in (start_K, position_K, prompt_start_K, prompt_stop_K)]
        self.input_ids = torch.tensor(tokens, dtype=torch.int64)
        self.own_start, position, self.prompt_start, self.prompt_stop = spread
        self.position_ids = position + torch.arange(len(tokens)) - self.own_start


def _slots_of(feature: InputFeature, prompt: int, own: int) -> list[int]:
    """The computed slots of a sequence in the order of its tokens; the prompt's last scores the first sampled token."""
    if not feature.completion_ids:
        return list(range(prompt, prompt + max(len(feature.prompt_ids) - 1, 1)))
    return [*range(prompt, prompt + len(feature.prompt_ids)), *range(own, own + own_slots(feature))]


def _rows(values: list[Tensor], width: int, fill: Tensor | None = None) -> Tensor:
    padding = torch.zeros(width, dtype=torch.int64) if fill is None else fill
    return torch.stack([torch.cat([v, padding[len(v) :]]) for v in values])
