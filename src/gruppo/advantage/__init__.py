"""Advantages: rewards become credit within a group.

    group.py   Groups: which rewards belong together, and exact statistics over them
    grpo.py    GRPOAdvantage: reward minus the group's mean, optionally over a standard deviation
    rloo.py    RLOOAdvantage: reward minus the mean of the others
    filter.py  which sequences to keep: groups with signal, sequences that ended by themselves

Statistics are taken in float64, and a group whose rewards are all equal gets exactly 0. To add an estimator, write
a frozen dataclass whose `__call__` builds `Groups` and returns `groups.result(...)`.
"""

from gruppo.advantage.filter import groups_with_signal, not_truncated
from gruppo.advantage.group import Groups
from gruppo.advantage.grpo import GRPOAdvantage
from gruppo.advantage.rloo import RLOOAdvantage

__all__ = ["GRPOAdvantage", "Groups", "RLOOAdvantage", "groups_with_signal", "not_truncated"]
