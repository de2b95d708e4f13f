"""Features -> PackedBatch. The only shift by one of a run is here.

A causal model's output at slot t predicts token t + 1, so `labels[t]` is token t + 1 of the same sequence when
that token is scored, else -100. The last token of a sequence predicts nothing and gets no slot: n tokens make
n - 1 slots. (A one-token sequence keeps its slot, unscored, so that no sequence vanishes from the layout.)
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gruppo.batch.batch import PackedBatch
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.types import InputFeature


def pack(features: Sequence[InputFeature]) -> PackedBatch:
    """Lay the features one after the other.

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
    input_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    offsets = [0]
    kinds: dict[tuple[int, ...], int] = {}
    kind: list[int] = []
    distinct: list[int] = []
    for i, feature in enumerate(features):
        if not feature.prompt_ids:
            raise InputError(f"feature {i} has no prompt token; its first completion token has nothing to follow")
        tokens = feature.input_ids
        num_slots = max(len(tokens) - 1, 1)
        inputs = tokens[:num_slots]
        input_ids += inputs
        kind.append(kinds.setdefault(inputs, len(kinds)))
        if kind[-1] == len(distinct):
            distinct.append(i)
        labels += _labels(feature)
        position_ids += range(num_slots)
        offsets.append(offsets[-1] + num_slots)
    labels_T = torch.tensor(labels, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        labels=labels_T,
        position_ids=torch.tensor(position_ids, dtype=torch.int64),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int64),
        max_length=max((b - a for a, b in pairwise(offsets)), default=0),
        old_logps=_logps("old_logps", features, labels_T),
        ref_logps=_logps("ref_logps", features, labels_T),
        distinct=torch.tensor(distinct, dtype=torch.int64),
        kind=torch.tensor(kind, dtype=torch.int64),
    )


def _labels(feature: InputFeature) -> list[int]:
    """Slots of the prompt but its last, then the slots that predict the completion."""
    mask = feature.completion_mask
    scored = [token if mask is None or mask[j] else IGNORE_INDEX for j, token in enumerate(feature.completion_ids)]
    return [IGNORE_INDEX] * (len(feature.prompt_ids) - 1) + (scored or [IGNORE_INDEX] * (len(feature.prompt_ids) == 1))


def _logps(name: str, features: Sequence[InputFeature], labels_T: Tensor) -> Tensor | None:
    """Scored tokens are laid out in the order of the features, so their values fill the scored slots in order."""
    values = [getattr(f, name) for f in features]
    absent = [i for i, v in enumerate(values) if v is None]
    if len(absent) == len(values):
        return None
    if absent:
        raise InputError(f"{name} is set on some features and missing on feature {absent[0]}; set it on all or none")
    logps_T = torch.zeros(len(labels_T), dtype=torch.float32)
    logps_T[labels_T != IGNORE_INDEX] = torch.tensor([x for v in values for x in v], dtype=torch.float32)
    return logps_T
