"""An estimator of one's own, and some that cannot be used."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class PerToken:
    """Centred reward over the completion's length."""

    factor: float = 1.0
    needs: ClassVar[tuple[str, ...]] = ("lengths",)

    def __call__(self, rewards, num_generations=1, group_ids=None, *, lengths=None):
        values = torch.tensor([0.0 if r is None else r for r in rewards], dtype=torch.float64)
        ids = torch.tensor(group_ids)
        means = torch.stack([values[ids == i].mean() for i in ids])
        return self.factor * (values - means) / torch.tensor(lengths)


class WantsTheWeather:
    needs = ("weather",)

    def __call__(self, rewards, group_ids=None, *, weather):
        return torch.zeros(len(rewards))


class OneNumber:
    def __call__(self, rewards, group_ids=None):
        return 0.0


class WithoutGroups:
    def __call__(self, rewards, num_generations):
        return torch.zeros(len(rewards))
