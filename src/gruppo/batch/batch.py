"""The tensors of one forward."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX, Segments

if TYPE_CHECKING:
    from gruppo.batch.shared import SharedPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences laid one after the other, without padding.

    Prompt [5, 6], completion [7, 8] and prompt [5], completion [9, 2] (see `pack` for the shift):

        slot          0     1     2  |  3     4
        input_ids     5     6     7  |  5     9
        labels     -100     7     8  |  9     2
        position_ids  0     1     2  |  0     1
        cu_seqlens    0                 3        5
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64: the token scored at the slot, or -100
    position_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int64
    max_length: int  # slots of the longest sequence
    old_logps: Tensor | None = None  # [T] float32, 0 where not scored
    ref_logps: Tensor | None = None  # [T] float32, 0 where not scored
    distinct: Tensor | None = None  # [U] int64: sequences with different input_ids, the first of each kind
    kind: Tensor | None = None  # [S] int64: which of `distinct` a sequence has the input_ids of
    sequence_ids: Tensor | None = None  # [S] int64: which sequence of the step each is, for losses that draw tokens
    shared: "SharedPrompts | None" = None  # the rows in which the body computes each prompt once
    in_one_row: bool = False  # the body runs on one row of all sequences; restarting positions tell them apart

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_slots(self) -> int:
        return len(self.input_ids)

    @property
    def segments(self) -> Segments:
        return Segments.from_offsets(self.labels != IGNORE_INDEX, self.cu_seqlens)

    def to(self, device: torch.device | str) -> "PackedBatch":
        moved: dict[str, Any] = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        if self.shared is not None:
            moved["shared"] = self.shared.to(device)
        return replace(self, **moved)

    def loss_inputs(self) -> dict[str, Tensor]:
        """The mapping that losses and metrics take as `inputs`."""
        inputs = {"labels": self.labels, "position_ids": self.position_ids, "cu_seqlens": self.cu_seqlens}
        return inputs if self.sequence_ids is None else inputs | {"sequence_ids": self.sequence_ids}
