"""Turns: conversations in which the policy and an environment take turns, as token ids that are sampled once."""

from gruppo.turns.adapters import environments_of
from gruppo.turns.environment import Answer, Environment, Environments
from gruppo.turns.tools import tool_schema

__all__ = ["Answer", "Environment", "Environments", "environments_of", "tool_schema"]
