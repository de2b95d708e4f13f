"""What becomes of a reward before it is compared: penalties that look at the length and the end of a completion.

These act on the weighted sum of the reward functions and are part of training alone; the held-out score does not see
them. A length limit that is a reward function of its own (`soft_overlong`) is in `length.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gruppo.errors import InputError
from gruppo.reward.length import SoftOverlong


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShape:
    """The soft overlong penalty and the price of being cut off, either of them or both.

        r * truncated_factor if cut off and that is less than r      (stop properly: ProRL v2, NeMo-RL, OpenRLHF)
        + 0 up to max_length - overlong_cache, then linear to -1     (DAPO, arXiv:2503.14476, equation 13)

    Others multiply a negative reward too, which pays a wrong completion for being cut off; here it stays as it is.

    >>> shape = RewardShape(max_length=10, overlong_cache=4, truncated_factor=0.5)
    >>> shape([1.0, 1.0, 1.0, -1.0, None], lengths=[6, 8, 10, 10, 10], truncated=[False, False, True, True, True])
    [1.0, 0.5, -0.5, -2.0, None]
    """

    max_length: int
    overlong_cache: int = 0
    """Tokens over which the penalty grows; 0: none."""
    truncated_factor: float | None = None
    """Factor on the reward of a completion that was cut off; None: none."""

    def __post_init__(self) -> None:
        if self.overlong_cache:
            SoftOverlong(max_length=self.max_length, cache=self.overlong_cache)  # checks both
        if self.truncated_factor is not None and not 0 <= self.truncated_factor <= 1:
            raise InputError(f"truncated_factor must be in 0..1, got {self.truncated_factor!r}")

    @property
    def does_nothing(self) -> bool:
        return not self.overlong_cache and self.truncated_factor is None

    def __call__(
        self, rewards: Sequence[float | None], lengths: Sequence[int], truncated: Sequence[bool]
    ) -> list[float | None]:
        """The rewards as training sees them; None stays None."""
        return [self.one(*each) for each in zip(rewards, lengths, truncated, strict=True)]

    def one(self, reward: float | None, length: int, is_truncated: bool) -> float | None:
        """The reward of one completion as training sees it."""
        reward = self.discounted(reward, is_truncated)
        if reward is not None and self.overlong_cache:
            over = length - (self.max_length - self.overlong_cache)
            reward -= min(max(over, 0) / self.overlong_cache, 1.0)
        return reward

    def discounted(self, reward: float | None, is_truncated: bool) -> float | None:
        """The reward after the discount for being cut off alone."""
        if reward is None or self.truncated_factor is None or not is_truncated:
            return reward
        return min(reward, reward * self.truncated_factor)
