"""Turns: conversations in which the policy and an environment take turns, as token ids that are sampled once."""

from gruppo.turns.environment import Answer, Environment

__all__ = ["Answer", "Environment"]
