"""Advantages: rewards become credit within a group.

Statistics are taken in float64. A group whose rewards are all equal gets exactly 0 unless the formula compares with
something outside the group. To add an estimator, write a subclass of `Estimator` whose `estimate` returns
`groups.result(...)`. A class of your own with the call of `Advantage` will do as well.
"""

from gruppo.advantage import estimator, grpo, length, reinforce, success
from gruppo.advantage.estimator import *
from gruppo.advantage.grpo import *
from gruppo.advantage.length import *
from gruppo.advantage.reinforce import *
from gruppo.advantage.success import *

__all__ = []
__all__ += estimator.__all__
__all__ += grpo.__all__
__all__ += length.__all__
__all__ += reinforce.__all__
__all__ += success.__all__
