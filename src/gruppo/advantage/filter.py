"""Which sequences to train on. A filter answers with one bool per sequence, so the groups stay recognisable:

    keep = groups_with_signal(rewards, num_generations=8)
    features = [f for f, k in zip(features, keep.tolist()) if k]
    advantages = advantages[keep]

Whether a dropped sequence still counts in its group's mean is decided by the order of the calls: advantages first
and filter after (it counts), or filter first and advantages over `group_ids[keep]` (it does not).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards
from gruppo.errors import InputError
from gruppo.types import StopReason


def groups_with_signal(
    rewards: Rewards,
    num_generations: int = 1,
    group_ids: Sequence[Any] | Tensor | None = None,
    tolerance: float = 0.0,
) -> Tensor:
    """True for every sequence of a group whose rewards differ by more than `tolerance`, `[N]` bool.

    Groups are kept or dropped whole.

    >>> groups_with_signal([1.0, 1.0, 0.0, 1.0], num_generations=2)
    tensor([False, False,  True,  True])
    """
    groups = Groups.read(rewards, num_generations, group_ids, "group")
    return groups.has_spread(tolerance)[groups.group].to(groups.device)


def not_truncated(stop_reasons: Sequence[StopReason]) -> Tensor:
    """True for sequences that ended by themselves, `[N]` bool.

    >>> not_truncated(["stop", "length"])
    tensor([ True, False])
    """
    for i, reason in enumerate(stop_reasons):
        if reason not in ("stop", "length"):
            raise InputError(f"stop_reasons[{i}] must be 'stop' or 'length', got {reason!r}")
    return torch.tensor([reason == "stop" for reason in stop_reasons], dtype=torch.bool)
