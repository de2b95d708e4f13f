"""Stage 3: completions become numbers.

    base.py      the contract: what a reward function is given, and `Reward`
    load.py      from "exact_match", "module:function" or a callable to a `Reward`
    verifiers.py number.py math_equal.py length.py     the built-in rewards, and `RewardShape`
    call.py returned.py     one call, and the check of what it returned
    combine.py tally.py budget.py     totals and metrics; failures, and how many are too many
    pool.py      `RewardPool`: everything above for one step, functions of others in processes that can be killed
    request.py crew.py child.py worker.py     what the pool is made of, down to the child process

To use your own, write a function with TRL's signature in a module and name it `module:function`:

    def has_greeting(completions, **kwargs):
        return [float("hello" in text) for text in completions]

To add a built-in, write a frozen dataclass with a `__call__` (or a `Verifier` with a `score`), give it time linear
in the text or `isolated = True`, and enter it in `load.BUILTIN`. The lower-case names below are the built-ins with
their default parameters; the classes take others: `NumberMatch(column="target")`.
"""

from gruppo.reward.base import Reward
from gruppo.reward.budget import ErrorBudget
from gruppo.reward.combine import RewardResult, weighted_totals
from gruppo.reward.length import LengthPenalty, RewardShape, SoftOverlong, length_penalty, soft_overlong
from gruppo.reward.load import load_reward
from gruppo.reward.math_equal import MathMatch, math_match
from gruppo.reward.number import NumberMatch, number_match
from gruppo.reward.pool import RewardPool
from gruppo.reward.verifiers import (
    ExactMatch,
    NormalizedMatch,
    PatternMatch,
    TagFormat,
    ThinkFormat,
    Verifier,
    exact_match,
    normalized_match,
    pattern_match,
    tag_format,
    think_format,
)

__all__ = [
    "ErrorBudget",
    "ExactMatch",
    "LengthPenalty",
    "MathMatch",
    "NormalizedMatch",
    "NumberMatch",
    "PatternMatch",
    "Reward",
    "RewardPool",
    "RewardResult",
    "RewardShape",
    "SoftOverlong",
    "TagFormat",
    "ThinkFormat",
    "Verifier",
    "exact_match",
    "length_penalty",
    "load_reward",
    "math_match",
    "normalized_match",
    "number_match",
    "pattern_match",
    "soft_overlong",
    "tag_format",
    "think_format",
    "weighted_totals",
]
