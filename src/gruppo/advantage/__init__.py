"""Advantages: rewards become credit within a group.

    group.py      Groups: which rewards belong together, and exact statistics over them
    inputs.py     what an estimator may need besides rewards, and shared checks
    grpo.py       GRPOAdvantage: reward minus the group's mean; DRGRPOAdvantage and LitePPOAdvantage: other divisors
    rloo.py       RLOOAdvantage: reward minus the mean of the others
    reinforce.py  REINFORCE++ with and without a group's baseline, ReMax
    gdpo.py       GDPOAdvantage: several rewards, each normalised by itself
    success.py    MaxRL, GPG, BetaNormAdvantage: rewards that mean right or wrong
    passk.py      PassAtKAdvantage, BestOfGroupAdvantage: one good completion among several
    length.py     OPO, LengthShapedAdvantage, LEADAdvantage: lengths count
    registry.py   ADVANTAGES: estimators by the name they have in a config
    filter.py     which sequences to keep: groups with signal, sequences that ended by themselves

Statistics are taken in float64. A group whose rewards are all equal gets exactly 0 where the formula says so. To add
an estimator, write a frozen dataclass whose `__call__` builds `Groups` and returns `groups.result(...)`, and enter it
in `registry.py`; what it takes besides rewards is a keyword of the call and listed in `needs`.
"""

from gruppo.advantage.filter import groups_with_signal, not_truncated
from gruppo.advantage.gdpo import GDPOAdvantage
from gruppo.advantage.group import Groups
from gruppo.advantage.grpo import DRGRPOAdvantage, GRPOAdvantage, LitePPOAdvantage
from gruppo.advantage.inputs import Advantage
from gruppo.advantage.length import LEADAdvantage, LengthShapedAdvantage, OPOAdvantage
from gruppo.advantage.passk import BestOfGroupAdvantage, PassAtKAdvantage
from gruppo.advantage.registry import ADVANTAGES
from gruppo.advantage.reinforce import (
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    ReMaxAdvantage,
)
from gruppo.advantage.rloo import RLOOAdvantage
from gruppo.advantage.success import BetaNormAdvantage, GPGAdvantage, MaxRLAdvantage

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "BestOfGroupAdvantage",
    "BetaNormAdvantage",
    "DRGRPOAdvantage",
    "GDPOAdvantage",
    "GPGAdvantage",
    "GRPOAdvantage",
    "Groups",
    "LEADAdvantage",
    "LengthShapedAdvantage",
    "LitePPOAdvantage",
    "MaxRLAdvantage",
    "OPOAdvantage",
    "PassAtKAdvantage",
    "RLOOAdvantage",
    "ReMaxAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
    "groups_with_signal",
    "not_truncated",
]
