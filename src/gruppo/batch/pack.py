"""Rollouts -> PackedBatch. The only shift by one of a run is here.

A causal model's output at slot t predicts token t + 1, so `labels[t]` is token t + 1 of the same sequence when
that token is scored, else -100. The last token of a sequence predicts nothing and gets no slot: n tokens make
n - 1 slots. (A one-token sequence keeps its slot, unscored, so that no sequence vanishes from the layout.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.batch.batch import PackedBatch
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.types import InputFeature, Rollout


def pack(inputs: Sequence[Rollout | InputFeature]) -> PackedBatch:
    """Lay the sequences one after the other.

    Example: prompt [5, 6] with completion [7, 8], and prompt [5] with completion [9, 2]

    >>> batch = pack([InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8)),
    ...               InputFeature(prompt_ids=(5,), completion_ids=(9, 2))])
    >>> batch.input_ids.tolist()
    [5, 6, 7, 5, 9]
    >>> batch.labels.tolist()
    [-100, 7, 8, 9, 2]
    >>> batch.position_ids.tolist()
    [0, 1, 2, 0, 1]
    >>> batch.cu_seqlens.tolist()
    [0, 3, 5]
    """
    rollouts = as_rollouts(inputs)
    input_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    cu_seqlens, offsets = [0], [0]
    kinds: dict[tuple[int, ...], int] = {}
    kind: list[int] = []
    distinct: list[int] = []
    for i, rollout in enumerate(rollouts):
        prompt, tokens = rollout.trajectory.prompt_ids, rollout.trajectory.tokens
        if not prompt:
            raise InputError(f"inputs[{i}] has no prompt token; its first completion token has nothing to follow")
        sequence = prompt + tokens
        num_slots = max(len(sequence) - 1, 1)
        body = sequence[:num_slots]
        input_ids += body
        kind.append(kinds.setdefault(body, len(kinds)))
        if kind[-1] == len(distinct):
            distinct.append(i)
        labels += _labels(rollout)
        position_ids += range(num_slots)
        cu_seqlens.append(cu_seqlens[-1] + num_slots)
        offsets.append(offsets[-1] + rollout.num_scored)
    labels_T = torch.tensor(labels, dtype=torch.int64)
    scored = (labels_T != IGNORE_INDEX).nonzero().squeeze(1)

    def placed(values: list[float] | None) -> Tensor | None:
        """Values of the scored tokens at their slots."""
        if values is None:
            return None
        return torch.zeros(len(labels)).index_copy_(0, scored, torch.tensor(values, dtype=torch.float32))

    advantages = placed(_advantages(rollouts))
    assert advantages is not None
    return PackedBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        labels=labels_T,
        position_ids=torch.tensor(position_ids, dtype=torch.int64),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int64),
        scored=scored,
        offsets=torch.tensor(offsets, dtype=torch.int64),
        lengths=tuple(rollout.num_scored for rollout in rollouts),
        advantages=advantages,
        old_logps=placed(_per_token("old_logps", rollouts, [r.old_logps for r in rollouts])),
        ref_logps=placed(_per_token("ref_logps", rollouts, [r.ref_logps for r in rollouts])),
        sampler_logps=placed(_per_token("sampler_logps", rollouts, [r.trajectory.logps for r in rollouts])),
        distinct=torch.tensor(distinct, dtype=torch.int64),
        kind=torch.tensor(kind, dtype=torch.int64),
    )


def as_rollouts(inputs: Sequence[Any]) -> list[Rollout]:
    """Sequences in either form as rollouts."""
    for i, each in enumerate(inputs):
        if not isinstance(each, Rollout | InputFeature):
            raise InputError(f"inputs[{i}] must be a Rollout or an InputFeature, got {type(each).__name__}")
    return [each if isinstance(each, Rollout) else each.rollout() for each in inputs]


def _labels(rollout: Rollout) -> list[int]:
    """Slots of the prompt but its last, then the slots that predict the completion."""
    trajectory = rollout.trajectory
    if rollout.is_masked:
        completion = [IGNORE_INDEX] * len(trajectory.tokens)
    elif trajectory.sampled is None:
        completion = list(trajectory.tokens)
    else:
        pairs = zip(trajectory.tokens, trajectory.sampled, strict=True)
        completion = [token if is_sampled else IGNORE_INDEX for token, is_sampled in pairs]
    prompt = len(trajectory.prompt_ids)
    return [IGNORE_INDEX] * (prompt - 1) + (completion or [IGNORE_INDEX] * (prompt == 1))


def _advantages(rollouts: Sequence[Rollout]) -> list[float]:
    values: list[float] = []
    for rollout in rollouts:
        advantage = rollout.advantage
        if isinstance(advantage, tuple):
            values += () if rollout.is_masked else advantage
        else:
            values += [advantage] * rollout.num_scored
    return values


def _per_token(name: str, rollouts: Sequence[Rollout], rows: Sequence[tuple[float, ...] | None]) -> list[float] | None:
    """Values of the scored tokens, in the order of the sequences."""
    absent = [i for i, row in enumerate(rows) if row is None]
    if len(absent) == len(rows):
        return None
    if absent:
        raise InputError(f"{name} is set on some sequences and missing on inputs[{absent[0]}]; set it on all or none")
    pairs = zip(rollouts, rows, strict=True)
    return [x for rollout, row in pairs if row is not None and not rollout.is_masked for x in row]
