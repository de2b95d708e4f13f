"""The K tokens whose probability moved most, with where they stand and what they are."""

from typing import Any

import torch
from torch import Tensor

from gruppo.loss.inputs import LossInputs

FIELDS = ("kl", "sequence", "position", "token_id", "ratio", "new_logp", "old_logp")
_WHOLE_NUMBERS = ("sequence", "position", "token_id")


def top_rows(
    inputs: LossInputs,
    kl_T: Tensor,
    ratio_T: Tensor,
    new_logps_T: Tensor,
    old_logps_T: Tensor,
    k: int,
    first_sequence: int,
) -> Tensor:
    """The K scored tokens with the largest KL as rows of FIELDS, best first, `[<= k, fields]` float64.

    Of equal tokens the earlier comes first, so that the choice does not depend on how the data was split. That is
    one top-K over integers: the bits of a non-negative float32 order like the number, and the slot breaks the tie.
    """
    segments = inputs.segments
    num_slots = segments.num_slots
    slot_T = torch.arange(num_slots, device=kl_T.device)
    kl_T = kl_T.to(torch.float32).contiguous()  # rows are merged by what they were chosen by
    bits_T = kl_T.view(torch.int32).to(torch.int64)
    key_T = torch.where(segments.mask, (bits_T << 32) | (num_slots - slot_T), -1)
    keys, best = key_T.topk(min(k, num_slots))
    sequence_T = segments.spread(torch.arange(segments.num_sequences, device=kl_T.device))
    columns = [
        kl_T,
        first_sequence + sequence_T,
        segments.position() if inputs.positions is None else inputs.positions,
        inputs.labels,
        ratio_T,
        new_logps_T,
        old_logps_T,
    ]
    rows = torch.stack([column[best].to(torch.float64) for column in columns], 1)
    rows[:, 0] = torch.where(keys >= 0, rows[:, 0], -torch.inf)  # fewer scored tokens than K
    return rows


def as_records(rows: Tensor) -> list[dict[str, Any]]:
    """Rows of FIELDS as dictionaries; empty rows are left out."""
    records = [dict(zip(FIELDS, row, strict=True)) for row in rows.tolist() if row[0] != float("-inf")]
    return [{k: int(v) if k in _WHOLE_NUMBERS else v for k, v in record.items()} for record in records]
