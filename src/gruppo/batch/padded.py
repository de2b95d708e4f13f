"""Padded `[B, L]` <-> packed `[T]`."""

import torch
from torch import Tensor

from gruppo.errors import InputError


def is_packed(position_ids: Tensor) -> bool:
    """Do these positions hold several sequences in one row?

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

    A sequence starts at every position 0 that is not padding; a one-slot sequence counts. Padding is what
    `attention_mask` says; without one it is a slot at position 0 that scores nothing and that no position 1
    follows: whether it is padding or an empty sequence, nothing of it reaches a loss. Padding slots stay with
    the sequence before them.
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


def pack_rows(values_BL: Tensor, attention_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the padding of each row and lay the rows one after the other: `([T], cu_seqlens [B + 1])`.

    >>> pack_rows(torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, 1], [1, 1, 0]]))
    (tensor([1, 2, 3, 4]), tensor([0, 2, 4]))
    """
    if values_BL.shape[:2] != attention_BL.shape:
        raise InputError(
            f"values have shape {tuple(values_BL.shape)} and attention_mask {tuple(attention_BL.shape)}; "
            "the first two axes must agree"
        )
    kept_BL = attention_BL != 0
    offsets = torch.cat([kept_BL.new_zeros(1, dtype=torch.int64), kept_BL.sum(1).cumsum(0)])
    return values_BL[kept_BL], offsets


def pad_tokens(values_T: Tensor, cu_seqlens: Tensor, fill: int | float) -> Tensor:
    """Packed to padded: sequence i becomes row i, padded on the right with `fill`, `[S, longest]`.

    >>> pad_tokens(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), fill=0)
    tensor([[1, 0],
            [2, 3]])
    """
    lengths_S = cu_seqlens.diff()
    column_L = torch.arange(int(lengths_S.max()) if len(lengths_S) else 0, device=values_T.device)
    used_SL = column_L[None, :] < lengths_S[:, None]
    rows = values_T.new_full((len(lengths_S), len(column_L), *values_T.shape[1:]), fill)
    rows[used_SL] = values_T
    return rows
