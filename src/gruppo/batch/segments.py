"""Segments: the slots of each sequence, and sums over a sequence.

In losses and metrics every per-token value is a flat `[T]` tensor over *slots*. A slot is scored or not (padding,
prompt), and the slots of a sequence are neighbours. Padded input is the special case of equally many slots per
sequence.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from gruppo.errors import InputError

IGNORE_INDEX = -100
"""Label of an unscored slot."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The slots `offsets[i]:offsets[i + 1]` are sequence i; `mask` holds which of them are scored.

    Two sequences of 2 and 3 slots, whose first slot is prompt:

    >>> s = Segments.from_offsets(torch.tensor([0, 1, 0, 1, 1]).bool(), torch.tensor([0, 2, 5]))
    >>> s.length.tolist()
    [1, 2]
    >>> s.sum(torch.tensor([9.0, 1.0, 9.0, 2.0, 3.0])).tolist()
    [1.0, 5.0]
    >>> s.spread(torch.tensor([7.0, 8.0])).tolist()
    [7.0, 7.0, 8.0, 8.0, 8.0]
    """

    bits: Tensor  # [T] int32, all ones where scored, 0 elsewhere: what `keep` works with
    offsets: Tensor  # [S + 1] int64, first slot of each sequence, then T
    length: Tensor  # [S] int64, scored slots per sequence
    slots_per_sequence: int | None  # set when all sequences own equally many slots: plain reshapes then do

    @classmethod
    def from_rows(cls, mask_BL: Tensor) -> "Segments":
        """One sequence per row of a padded batch; the mask is bool, or 0 and 1 in int32."""
        num_rows, num_columns = mask_BL.shape
        offsets = torch.arange(num_rows + 1, device=mask_BL.device) * num_columns
        mask_BL = mask_BL.to(torch.int32)
        length_B = mask_BL.sum(1, dtype=torch.int32).to(torch.int64)
        return cls(mask_BL.neg().view(-1), offsets, length_B, num_columns)

    @classmethod
    def from_offsets(cls, mask_T: Tensor, offsets: Tensor) -> "Segments":
        """Sequences of any length, one after the other (`offsets` is what attention kernels call cu_seqlens)."""
        if not offsets.is_cuda:  # reading the values would make the host wait for a GPU
            ends, num_slots = offsets.tolist(), len(mask_T)
            if len(ends) < 1 or ends[0] != 0 or ends[-1] != num_slots or any(a > b for a, b in pairwise(ends)):
                raise InputError(
                    f"cu_seqlens must rise from 0 to the number of slots ({num_slots}), got {ends}; "
                    "entry i is the first slot of sequence i"
                )
        length = torch.segment_reduce(mask_T.to(torch.float64), "sum", offsets=offsets, unsafe=True, initial=0)
        return cls(-mask_T.to(torch.int32), offsets, length.to(torch.int64), None)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_slots(self) -> int:
        return len(self.bits)

    @property
    def mask(self) -> Tensor:
        """The scored slots, `[T]` bool."""
        return self.bits.to(torch.bool)

    def window(self, slots: slice) -> "Segments":
        """The sequences that the slots touch, cut to the slots; `length` stays that of the whole sequences."""
        start, stop = slots.start, slots.stop
        ends = self.offsets.clamp(start, stop) - start
        # Sequences outside the window keep no slots, so that the host need not read how many there are.
        return Segments(self.bits[slots], ends, self.length, None)

    def restricted(self, keep_T: Tensor) -> "Segments":
        """The same sequences with only those scored slots for which `keep_T` `[T]` is true."""
        bits_T = self.bits & -keep_T.to(torch.int32)
        return replace(self, bits=bits_T, length=self.sum(keep_T.to(torch.float64)).to(torch.int64))

    def keep(self, values_T: Tensor) -> Tensor:
        """Values of scored slots, and exactly 0 elsewhere, whatever was there (even NaN); the same for gradients.

        An AND over the bits of the values takes a tenth of the time of `torch.where` on a CPU.
        """
        if values_T.requires_grad and torch.is_grad_enabled():
            return _Keep.apply(values_T, self)  # type: ignore[return-value]
        integer = torch.int64 if values_T.dtype == torch.float64 else torch.int32
        return (values_T.contiguous().view(integer) & self.bits.to(integer)).view(values_T.dtype)

    def keep_(self, values_T: Tensor) -> Tensor:
        """`keep` in place, for a tensor without gradient that is not used elsewhere."""
        assert not values_T.requires_grad
        integer = torch.int64 if values_T.dtype == torch.float64 else torch.int32
        values_T.view(integer).bitwise_and_(self.bits.to(integer))
        return values_T

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over the scored slots of each sequence, `[S]`. Other slots may hold anything."""
        values_T = self.keep(values_T)
        if self.slots_per_sequence is not None:
            return values_T.view(self.num_sequences, self.slots_per_sequence).sum(1)
        # segment_reduce, and not index_add, because it adds in a fixed order on a GPU too; `unsafe` skips a check
        # that would make the host wait, and from_offsets has made it already.
        return torch.segment_reduce(values_T, "sum", offsets=self.offsets, unsafe=True, initial=0)

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean over the scored slots of each sequence, `[S]`; 0 for a sequence with none."""
        return self.sum(values_T) / self.length.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """Give each slot the value of its sequence, `[T]`."""
        if self.slots_per_sequence is not None:
            return values_S[:, None].expand(-1, self.slots_per_sequence).contiguous().view(-1)
        return torch.repeat_interleave(values_S, self.offsets.diff(), output_size=len(self.bits))

    def position(self) -> Tensor:
        """Index of each slot within its sequence, `[T]`."""
        return torch.arange(self.num_slots, device=self.bits.device) - self.spread(self.offsets[:-1])


class _Keep(torch.autograd.Function):
    """`Segments.keep` in both directions; inside `forward` gradients are off, so it takes its fast path."""

    @staticmethod
    def forward(ctx, values_T: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.keep(values_T)

    @staticmethod
    def backward(ctx, grad_T: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.segments.keep(grad_T), None


def is_packed(position_ids: Tensor) -> bool:
    """True if these positions hold several sequences in one row.

    A batch of several rows is padded: one sequence per row. Zeros before the first sequence are padding on the left.

    >>> is_packed(torch.tensor([[0, 1, 2, 0, 1]])), is_packed(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    (True, False)
    >>> is_packed(torch.tensor([[0, 0, 0, 1, 2]]))
    False
    """
    if position_ids.dim() == 2 and len(position_ids) > 1:
        return False
    position_T = position_ids.reshape(-1)
    return bool(((position_T[1:] == 0) & (position_T[:-1] != 0)).any())


def offsets_from_positions(
    position_T: Tensor,  # [T] int
    scored_T: Tensor,  # [T] bool
    attention_T: Tensor | None = None,  # [T] 0/1
) -> Tensor:
    """First slot of each sequence of a packed row, then T: `[S + 1]`.

    A sequence starts at every position 0 that is not padding; a one-slot sequence counts. Padding is where
    `attention_mask` is 0; without one it is a slot at position 0 that scores nothing and that no position 1 follows.
    Padding slots stay with the sequence before them.
    """
    starts_T = position_T == 0
    if attention_T is not None:
        starts_T = starts_T & (attention_T != 0)
    else:
        next_T = torch.cat([position_T[1:], position_T.new_zeros(1)])
        starts_T = starts_T & (scored_T | (next_T == 1))
    starts = starts_T.nonzero().squeeze(1)
    if len(position_T) and len(starts) == 0:
        raise InputError("position_ids hold no sequence start (a 0 outside padding); positions must restart at 0")
    if len(starts):
        starts[0] = 0  # padding in front of the first sequence joins it
    return torch.cat([starts, starts.new_tensor([len(position_T)])])
