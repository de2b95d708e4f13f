"""Rewards: completions become numbers, in processes that can be killed (docs/rewards.md).

The lower-case names are the built-ins with default parameters; the classes take others: `NumberMatch(column="target")`.
"""

from gruppo.reward.call import TrainerState
from gruppo.reward.length import LengthPenalty, RewardShape, SoftOverlong, length_penalty, soft_overlong
from gruppo.reward.load import Reward, load_reward
from gruppo.reward.math_equal import MathMatch, math_match
from gruppo.reward.number import NumberMatch, number_match
from gruppo.reward.result import RewardResult, weighted_totals
from gruppo.reward.scorer import RewardScorer
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
    "ExactMatch",
    "LengthPenalty",
    "MathMatch",
    "NormalizedMatch",
    "NumberMatch",
    "PatternMatch",
    "Reward",
    "RewardResult",
    "RewardScorer",
    "RewardShape",
    "SoftOverlong",
    "TagFormat",
    "ThinkFormat",
    "TrainerState",
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
