"""Advantages: rewards become credit within a group.

Statistics are float64. A group with equal rewards gets exactly 0, unless the formula compares with something outside
the group. To add an estimator, subclass `Estimator` and return `groups.result(...)` from `estimate`. Any class with the
call of `Advantage` works too.
"""

from gruppo.advantage import baseline, estimator, success
from gruppo.advantage.baseline import *
from gruppo.advantage.estimator import *
from gruppo.advantage.success import *

__all__ = []
__all__ += baseline.__all__
__all__ += estimator.__all__
__all__ += success.__all__
