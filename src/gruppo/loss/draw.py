"""Random numbers per token as a function of (seed, step, place in the step), for parts that draw tokens.

A place is (which sequence of the step, which scored token of it): the same in every layout, micro-batch and window.
"""

import torch
from torch import Tensor

from gruppo.batch.segments import Segments

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def token_places(sequence_ids_S: Tensor, segments: Segments) -> Tensor:
    """A 64-bit key of each scored token's place in the step, `[T]`; slots that are not scored hold anything."""
    scored_T = segments.mask.to(torch.int64)
    before_T = scored_T.cumsum(0) - scored_T  # scored slots before this one, in this batch
    starts = torch.cat([before_T, scored_T.sum()[None]])[segments.offsets[:-1]]
    rank_T = before_T - segments.spread(starts)
    return _mix(_mix(segments.spread(sequence_ids_S.to(torch.int64)) + _GOLDEN) ^ (rank_T * _GOLDEN))


def uniforms(places_T: Tensor, labels_T: Tensor, seed: int, step: int) -> Tensor:
    """A number in [0, 1) per token, `[T]` float64, another in each step."""
    stream = ((seed + 1) * 0x5851F42D4C957F2D + step * 0x14057B7EF767814F) % 2**62
    key_T = _mix(places_T ^ _mix(labels_T + stream))
    return _shift(key_T, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: every input bit reaches every output bit. int64 products wrap around."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
