"""Advantages: rewards become credit within a group.

    group.py      Groups: which rewards belong together, and exact statistics over them; filters
    base.py       Estimator: what the estimators share; ADVANTAGES: estimators by the name they have in a config
    grpo.py       GRPO, leave-one-out, Dr. GRPO, Lite PPO; GDPO: several rewards, each normalised by itself
    length.py     OPO, length-shaped, GRPO-LEAD: lengths count
    reinforce.py  REINFORCE++ with and without a group's baseline, ReMax
    success.py    GPG, MaxRL, BNPO's Beta normalisation, pass@k, best of a group: rewards that mean right or wrong

Statistics are taken in float64. A group whose rewards are all equal gets exactly 0 where the formula says so. To add an
estimator, write a subclass of `Estimator` whose `estimate` returns `groups.result(...)`. A class of your own with the
call of `Advantage` will do as well.
"""

from gruppo.advantage import base, group, grpo, length, reinforce, success
from gruppo.advantage.base import *
from gruppo.advantage.group import *
from gruppo.advantage.grpo import *
from gruppo.advantage.length import *
from gruppo.advantage.reinforce import *
from gruppo.advantage.success import *

__all__ = []
__all__ += base.__all__
__all__ += group.__all__
__all__ += grpo.__all__
__all__ += length.__all__
__all__ += reinforce.__all__
__all__ += success.__all__
