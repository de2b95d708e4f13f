"""Advantages: rewards become credit within a group.

Statistics are taken in float64. A group whose rewards are all equal gets exactly 0 unless the formula compares with
something outside the group. To add an estimator, write a subclass of `Estimator` whose `estimate` returns
`groups.result(...)`. A class of your own with the call of `Advantage` will do as well.
"""

from gruppo.advantage import baseline, estimator, success
from gruppo.advantage.baseline import *
from gruppo.advantage.estimator import *
from gruppo.advantage.success import *

__all__ = []
__all__ += baseline.__all__
__all__ += estimator.__all__
__all__ += success.__all__
