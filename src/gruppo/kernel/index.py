"""Rows of a tensor by index, with backwards that know whether a row is taken twice."""

import torch
from torch import Tensor


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values_TD: Tensor, index_N: Tensor, repeats: bool) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows, ctx.repeats = len(values_TD), repeats
        return values_TD.index_select(0, index_N)

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index_N,) = ctx.saved_tensors
        shape = (ctx.num_rows, *grad_ND.shape[1:])
        if not ctx.repeats:
            # A plain copy to where the rows came from; autograd's own backward must add, and sorts the index to do so.
            return grad_ND.new_zeros(shape).index_copy_(0, index_N, grad_ND), None, None
        # A prompt's last slot gathers the gradients of its whole group; in bf16 each addition would round.
        dtype = torch.promote_types(grad_ND.dtype, torch.float32)
        grad_TD = grad_ND.new_zeros(shape, dtype=dtype).index_add_(0, index_N, grad_ND.to(dtype))
        return grad_TD.to(grad_ND.dtype), None, None


def take_unique(values_TD: Tensor, index_N: Tensor) -> Tensor:
    """`values[index]` along the first axis; `index` holds no row twice.

    >>> take_unique(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
    tensor([[3.],
            [1.]])
    """
    return _Take.apply(values_TD, index_N, False)  # type: ignore[return-value]


def take_repeated(values_TD: Tensor, index_N: Tensor) -> Tensor:
    """`values[index]` along the first axis; a row that is taken several times gets the sum of their gradients.

    >>> take_repeated(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2]))
    tensor([[3.],
            [1.],
            [3.]])
    """
    return _Take.apply(values_TD, index_N, True)  # type: ignore[return-value]
