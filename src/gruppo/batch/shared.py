"""Shared prompts: rows for the body of a model in which each prompt is computed once per group.

`PackedBatch` keeps one slot per token of every sequence, and losses, metrics and the head see only that. These rows are
for the *body*; `slot_of` maps each slot of the batch to the computed slot that has its hidden state.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gruppo.batch.microbatch import split_shared
from gruppo.batch.packed import PackedBatch, SharedPrompts, as_rollouts, pack, tensor_of
from gruppo.types import InputFeature, Rollout, Trajectory

TILE = 128
"""Slots of a tile of a segment."""


def prompt_groups(trajectories: Sequence[Trajectory]) -> list[int]:
    """The group of each trajectory: those whose prompts are equal token by token, in any order.

    >>> from gruppo.types import Prompt
    >>> first, other = (Trajectory(prompt=Prompt(token_ids=ids), tokens=(7,)) for ids in ((5, 6), (5, 7)))
    >>> prompt_groups([first, other, first])
    [0, 1, 0]
    """
    groups: dict[tuple[int, ...], int] = {}
    return [groups.setdefault(t.prompt_ids, len(groups)) for t in trajectories]


def own_slots(trajectory: Trajectory) -> int:
    """Slots that a sequence needs besides its prompt's: its completion except the last token."""
    return max(len(trajectory.tokens) - 1, 0)


def pack_shared(
    inputs: Sequence[Rollout | InputFeature], *, row_slots: int | None = None, multiple_of: int = 1
) -> PackedBatch:
    """As `pack`, with the rows in which the body computes each prompt once, and equal sequences once.

    Args:
        row_slots: how long a row may get; a group that is longer is split, and its prompt repeated in each part.
            None: one row for everything.
        multiple_of: rows are padded to a multiple of this many slots.
    """
    rollouts = as_rollouts(inputs)
    batch = pack(rollouts)
    assert batch.distinct is not None and batch.kind is not None
    computed = [rollouts[i].trajectory for i in batch.distinct.tolist()]
    groups = prompt_groups(computed)
    if row_slots is None:
        parts = [list(range(len(computed)))]
    else:
        parts = split_shared(groups, [len(t.prompt_ids) for t in computed], [own_slots(t) for t in computed], row_slots)
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
            slot_of=tensor_of([s for k in batch.kind.tolist() for s in slots[k]]),
            num_slots=sum(len(row.input_ids) for row in rows),
            tiles=tiles_of(rows[0].segments) if len(rows) == 1 else None,
        ),
    )


class _Row:
    """One row: the tensors over its slots, its segments, and where prompt and own slots of each sequence start."""

    def __init__(self, trajectories: list[Trajectory], groups: list[int]) -> None:
        prompts = dict(zip(groups, (t.prompt_ids for t in trajectories), strict=True))
        tokens: list[int] = []
        first: dict[int, int] = {}
        for group, prompt in prompts.items():
            first[group] = len(tokens)
            tokens += prompt
        lengths = [len(prompt) for prompt in prompts.values()]
        ranges = [(0, 0, 0)] * len(prompts)  # of a segment: position of its first slot, start and stop of its prompt
        readers: dict[int, list[int]] = {}  # where the completions of a group start and stop
        self.places = [(0, 0)] * len(trajectories)
        for i in sorted(range(len(trajectories)), key=groups.__getitem__):  # a group's completions are neighbours
            group, trajectory = groups[i], trajectories[i]
            start, prompt = first[group], len(prompts[group])
            self.places[i] = start, len(tokens)
            readers.setdefault(group, [len(tokens), 0])
            tokens += trajectory.tokens[:-1]
            readers[group][1] = len(tokens)
            lengths.append(own_slots(trajectory))
            ranges.append((prompt, start, start + prompt))
        length_K = torch.tensor(lengths, dtype=torch.int64)
        start_K = length_K.cumsum(0) - length_K
        position_K, prompt_start_K, prompt_stop_K = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3).unbind(1)
        spread = [x.repeat_interleave(length_K) for x in (start_K, position_K, prompt_start_K, prompt_stop_K)]
        self.input_ids = tensor_of(tokens)
        self.own_start, position, self.prompt_start, self.prompt_stop = spread
        self.position_ids = position + torch.arange(len(tokens)) - self.own_start
        seen_by = [*(readers[group] for group in prompts), *[[0, 0]] * len(trajectories)]
        self.segments = [
            (start, start + length, *own[1:], *others)
            for start, length, own, others in zip(start_K.tolist(), lengths, ranges, seen_by, strict=True)
        ]


def tiles_of(segments: Sequence[Sequence[int]]) -> Tensor:
    """The segments of a row in tiles of at most `TILE` slots, for kernels, `[N, 7]` int32:

        first, start, stop            first slot of the tile; first slot of its segment, and the slot after its last
        prompt_start, prompt_stop     the prompt that a completion sees; empty for a prompt
        reader_start, reader_stop     the completions that see a prompt; empty for a completion

    >>> tiles_of([(0, 130, 0, 0, 130, 140), (130, 140, 0, 130, 0, 0)]).tolist()
    [[0, 0, 130, 0, 0, 130, 140], [128, 0, 130, 0, 0, 130, 140], [130, 130, 140, 0, 130, 0, 0]]
    """
    rows = [(first, *segment) for segment in segments for first in range(segment[0], segment[1], TILE)]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 7)


def _slots_of(trajectory: Trajectory, prompt: int, own: int) -> list[int]:
    """The computed slots of a sequence in the order of its tokens; the prompt's last scores the first sampled token."""
    length = len(trajectory.prompt_ids)
    if not trajectory.tokens:
        return list(range(prompt, prompt + max(length - 1, 1)))
    return [*range(prompt, prompt + length), *range(own, own + own_slots(trajectory))]


def _rows(values: list[Tensor], width: int, fill: Tensor | None = None) -> Tensor:
    padding = torch.zeros(width, dtype=torch.int64) if fill is None else fill
    return torch.stack([torch.cat([v, padding[len(v) :]]) for v in values])
