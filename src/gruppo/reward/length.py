"""Length of a completion in sampled tokens, as a reward of its own and as a penalty on the sum of all rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Penalty on the last `cache` tokens before the length limit, from 0 to -1: DAPO, arXiv:2503.14476, equation 13.

    The defaults are the paper's; `max_length` should be the run's own limit.

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
        return [0.0 - self.penalty(len(ids)) for ids in completion_ids]

    def penalty(self, length: int) -> float:
        """Amount that comes off the reward of a completion, from 0 to 1."""
        return min(max(length - (self.max_length - self.cache), 0) / self.cache, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShape:
    """Penalties on the weighted sum of the rewards: the soft overlong penalty and a discount for being cut off.

    They are part of training alone; the held-out score is without them. A negative reward gets no discount.

    >>> shape = RewardShape(max_length=10, overlong_cache=4, truncated_factor=0.5)
    >>> shape([1.0, 1.0, 1.0, -1.0, None], lengths=[6, 8, 10, 10, 10], truncated=[False, False, True, True, True])
    [1.0, 0.5, -0.5, -2.0, None]
    """

    max_length: int
    overlong_cache: int = 0
    """Tokens over which the penalty grows; 0 switches it off."""
    truncated_factor: float | None = None
    """Factor on the reward of a completion that was cut off; None switches the discount off."""

    overlong: SoftOverlong | None = field(init=False, repr=False)
    does_nothing: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.truncated_factor is not None and not 0 <= self.truncated_factor <= 1:
            raise InputError(f"truncated_factor must be in 0..1, got {self.truncated_factor!r}")
        overlong = SoftOverlong(max_length=self.max_length, cache=self.overlong_cache) if self.overlong_cache else None
        object.__setattr__(self, "overlong", overlong)
        object.__setattr__(self, "does_nothing", overlong is None and self.truncated_factor is None)

    def __call__(
        self, rewards: Sequence[float | None], lengths: Sequence[int], truncated: Sequence[bool]
    ) -> list[float | None]:
        """The rewards with their penalties; None stays None."""
        return [self.one(*each) for each in zip(rewards, lengths, truncated, strict=True)]

    def one(self, reward: float | None, length: int, is_truncated: bool) -> float | None:
        """The reward of one completion with its penalties."""
        reward = self.discounted(reward, is_truncated)
        return reward if reward is None or self.overlong is None else reward - self.overlong.penalty(length)

    def discounted(self, reward: float | None, is_truncated: bool) -> float | None:
        """The reward with the discount for being cut off alone."""
        if reward is None or self.truncated_factor is None or not is_truncated:
            return reward
        return min(reward, reward * self.truncated_factor)


length_penalty = LengthPenalty()
soft_overlong = SoftOverlong()
