"""Rewards for the length of a completion, counted in sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gruppo.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPenalty:
    """Distance of the length from a target: `-min(|length - target| / scale, 1)`.

    With target 0, shorter is better. A target above 0 is the exact form of LCPO, arXiv:2503.04697, bounded at -1.

    >>> LengthPenalty(target=2, scale=4)(completion_ids=[[5, 6], [5, 6, 7], [5] * 100])
    [0.0, -0.25, -1.0]
    """

    target: int = 0
    scale: float = 1024.0
    """Distance at which the penalty is complete."""

    isolated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise InputError(f"scale must be positive, got {self.scale}")

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float | None]:
        return [0.0 - min(abs(len(ids) - self.target) / self.scale, 1.0) for ids in completion_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong:
    """Penalty on the last stretch before the length limit, so that a cut-off does not come as a surprise.

        0                                           length <= max_length - cache
        (max_length - cache - length) / cache       up to max_length
        -1                                          beyond

    DAPO, arXiv:2503.14476, equation 13. The defaults are the paper's; `max_length` should be the run's own limit.

    >>> SoftOverlong(max_length=10, cache=4)(completion_ids=[[0] * 6, [0] * 7, [0] * 10, [0] * 11])
    [0.0, -0.25, -1.0, -1.0]
    """

    max_length: int = 20480
    cache: int = 4096

    isolated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise InputError(f"cache must be in 1..max_length={self.max_length}, got {self.cache}")

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float | None]:
        start = self.max_length - self.cache
        return [0.0 - min(max(len(ids) - start, 0) / self.cache, 1.0) for ids in completion_ids]


length_penalty = LengthPenalty()
soft_overlong = SoftOverlong()
