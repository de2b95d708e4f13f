"""PackedBatch: the tensors of one forward, and of the loss that follows it."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from gruppo.batch.segments import Segments


class _Tensors:
    """Dataclasses of tensors that move to a device together."""

    __slots__ = ()

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]  # the subclasses are dataclasses
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = value.to(device, non_blocking=True)
            elif isinstance(value, _Tensors):
                moved[each.name] = value.to(device)
            elif isinstance(value, dict):
                moved[each.name] = {}  # what kernels made on the device before
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts(_Tensors):
    """Rows of W slots in which each prompt is computed once: first the prompts of the row, then the completions.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(_Tensors):
    """Sequences laid one after the other, without padding, and what the loss needs of each token.

    Prompt [5, 6], completion [7, 8] and prompt [5], completion [9, 2] (see `pack` for the shift):

        slot          0     1     2  |  3     4
        input_ids     5     6     7  |  5     9
        labels     -100     7     8  |  9     2
        position_ids  0     1     2  |  0     1
        cu_seqlens    0                 3        5
        scored              1     2     3     4
        offsets             0           2        4

    `T` slots, `S` sequences, `N` scored slots.
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64: the token scored at the slot, or -100
    position_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int64: first slot of each sequence, then T
    scored: Tensor  # [N] int64: the slots that are scored
    offsets: Tensor  # [S + 1] int64: first of each sequence among the scored slots, then N
    lengths: tuple[int, ...]  # scored slots of each sequence, on the host
    advantages: Tensor  # [T] float32, 0 where not scored; so the next three
    old_logps: Tensor | None = None  # [T] float32
    ref_logps: Tensor | None = None  # [T] float32
    sampler_logps: Tensor | None = None  # [T] float32
    distinct: Tensor | None = None  # [U] int64: sequences with different input_ids, the first of each kind
    kind: Tensor | None = None  # [S] int64: which of `distinct` a sequence has the input_ids of
    sequence_ids: Tensor | None = None  # [S] int64: which sequence of the step each is, for losses that draw tokens
    shared: SharedPrompts | None = None  # the rows in which the body computes each prompt once
    in_one_row: bool = False  # the body runs over all sequences in one row, for attention that knows boundaries

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_slots(self) -> int:
        return len(self.input_ids)

    @property
    def segments(self) -> Segments:
        """The sequences over their scored slots alone, `[N]`."""
        return Segments.of_scored(self.offsets, len(self.scored))

    def loss_inputs(self) -> dict[str, Tensor]:
        """The mapping that a loss or a metric takes as `inputs` when it is called over all slots, `[T]`."""
        return {"labels": self.labels, "position_ids": self.position_ids, "cu_seqlens": self.cu_seqlens}
