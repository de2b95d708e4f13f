"""Aggregation: the weight of a token, so that `loss = sum_t weight_t * loss_t`.

An aggregation takes the Segments of this micro-batch and the Totals of the step and gives the weight of each
sequence's tokens, `[S]` in float64. Because the denominators are the step's and not the micro-batch's, the losses
of micro-batches (and ranks) add up to the loss of the step, however it was split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gruppo.batch.packed import Count, Totals
from gruppo.batch.segments import Segments
from gruppo.errors import InputError

__all__ = [
    "ConstantLength", "local_token_mean", "sequence_mean", "sequence_mean_token_sum", "token_mean", "token_sum",
]  # fmt: skip


def sequence_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over sequences of the mean over their tokens"""
    return _one_over(segments, totals.sequences) / segments.length.clamp(min=1)


def token_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over all tokens of the step"""
    return _one_over(segments, totals.tokens)


def local_token_mean(segments: Segments, totals: Totals) -> Tensor:
    """mean over the tokens of this call on this rank, averaged over calls and ranks"""
    assert totals.local_tokens is not None
    return totals.local_share * _one_over(segments, totals.local_tokens)


def sequence_mean_token_sum(segments: Segments, totals: Totals) -> Tensor:
    """mean over sequences of the sum over their tokens"""
    return _one_over(segments, totals.sequences)


def token_sum(segments: Segments, totals: Totals) -> Tensor:
    """sum over all tokens of the step, divided by nothing"""
    return _one_over(segments, 1)


@dataclass(frozen=True)
class ConstantLength:
    """Dr. GRPO, arXiv:2503.20783: a constant in place of each sequence's own length."""

    max_completion_length: int = 1024

    def __post_init__(self) -> None:
        if self.max_completion_length < 1:
            raise InputError(f"max_completion_length must be at least 1, got {self.max_completion_length}")

    def __str__(self) -> str:
        return f"sum over tokens / (sequences * {self.max_completion_length})"

    def __call__(self, segments: Segments, totals: Totals) -> Tensor:
        return _one_over(segments, totals.sequences * self.max_completion_length)


def _one_over(segments: Segments, count: Count) -> Tensor:
    """1 / count for each sequence. A step without tokens divides its empty sum by 1 and gives exactly 0."""
    if isinstance(count, Tensor):
        return (1 / count.to(torch.float64).clamp(min=1)).expand(segments.num_sequences)
    # `full` and not a tensor made of the number: copying one to a GPU would make the host wait
    size, device = (segments.num_sequences,), segments.offsets.device
    return torch.full(size, 1 / max(count, 1), dtype=torch.float64, device=device)
