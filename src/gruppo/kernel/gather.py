"""Rows of a tensor by index, with backwards that know whether a row is taken twice."""

import torch
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values_TD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = len(values_TD)
        return values_TD.index_select(0, index_N)

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index_N,) = ctx.saved_tensors
        # A plain copy to where the rows came from; autograd's own backward must add, and sorts the index to do so.
        grad_TD = grad_ND.new_zeros(ctx.num_rows, *grad_ND.shape[1:])
        return grad_TD.index_copy_(0, index_N, grad_ND), None


def take_rows(values_TD: Tensor, index_N: Tensor) -> Tensor:
    """`values[index]` along the first axis; `index` holds no row twice.

    >>> take_rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
    tensor([[3.],
            [1.]])
    """
    return _TakeRows.apply(values_TD, index_N)  # type: ignore[return-value]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values_TD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = len(values_TD)
        return values_TD.index_select(0, index_N)

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index_N,) = ctx.saved_tensors
        # A prompt's last slot gathers the gradients of its whole group; in bf16 each addition would round.
        dtype = torch.promote_types(grad_ND.dtype, torch.float32)
        grad_TD = grad_ND.new_zeros(ctx.num_rows, *grad_ND.shape[1:], dtype=dtype)
        return grad_TD.index_add_(0, index_N, grad_ND.to(dtype)).to(grad_ND.dtype), None


def gather_rows(values_TD: Tensor, index_N: Tensor) -> Tensor:
    """`values[index]` along the first axis; a row that is taken several times gets the sum of their gradients.

    >>> gather_rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2]))
    tensor([[3.],
            [1.],
            [3.]])
    """
    return _GatherRows.apply(values_TD, index_N)  # type: ignore[return-value]
