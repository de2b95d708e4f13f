"""Random numbers without a generator: SplitMix64 of the integers that identify a draw.

    rollouts   (seed, step, prompt, sample, position)                   row_keys, row_uniforms: numpy
    losses     (seed, step, sequence of the step, token of it, label)   token_places, token_uniforms: torch

A number does not depend on the rest of the batch, the layout, the device or earlier draws. So five integers repeat any
rollout, results do not depend on micro-batches, and resuming needs no saved generator.

Both compute in int64, whose products wrap around in numpy and torch.
"""

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np  # the losses need only torch

    from gruppo.batch.segments import Segments

    Int64 = TypeVar("Int64", np.ndarray, Tensor)


def row_keys(
    seed: "int | np.ndarray", step: "int | np.ndarray", prompts: "np.ndarray", samples: "np.ndarray"
) -> "np.ndarray":
    """One 64-bit key per (seed, step, prompt, sample), `[N]` uint64."""
    import numpy as np

    key = _mix(np.full(len(prompts), seed, dtype=np.uint64).view(np.int64))
    for part in (np.full(len(prompts), step), prompts, samples):
        key = _mix(key ^ _mix(part.astype(np.int64) + _GOLDEN))
    return key.view(np.uint64)


def row_uniforms(keys: "np.ndarray", position: "int | np.ndarray") -> "np.ndarray":
    """Number in [0, 1) per key for the token at `position`, `[N]` float64; `[N, 1]` keys take several positions."""
    place = (position + 1) * _GOLDEN
    bits = _mix(keys.view("int64") + (_signed(place) if isinstance(place, int) else place))
    return _shift(bits, 11).astype("float64") * 2.0**-53


def token_places(sequence_ids_S: Tensor, segments: "Segments") -> Tensor:
    """64-bit key of each scored token's place in the step, `[T]`; unscored slots hold anything."""
    scored_T = segments.mask.to(torch.int64)
    before_T = scored_T.cumsum(0) - scored_T  # scored slots before this one, in this batch
    starts = torch.cat([before_T, scored_T.sum()[None]])[segments.offsets[:-1]]
    rank_T = before_T - segments.spread(starts)
    return _mix(_mix(segments.spread(sequence_ids_S.to(torch.int64)) + _GOLDEN) ^ (rank_T * _GOLDEN))


def token_uniforms(places_T: Tensor, labels_T: Tensor, seed: int, step: int) -> Tensor:
    """Number in [0, 1) per token, `[T]` float64, different in each step."""
    stream = ((seed + 1) * 0x5851F42D4C957F2D + step * 0x14057B7EF767814F) % 2**62
    return _shift(_mix(places_T ^ _mix(labels_T + stream)), 11).to(torch.float64) * 2.0**-53


def _signed(x: int) -> int:
    """Int64 with the same lowest 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: "Int64") -> "Int64":
    """SplitMix64's finaliser: every input bit affects every output bit."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: "Int64", bits: int) -> "Int64":
    """Logical shift right; plain `>>` would fill with the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
