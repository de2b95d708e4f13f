"""Environment: what answers the policy's turns: tools, a game, a class of TRL's kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.errors import InputError
from gruppo.process.by_name import did_you_mean
from gruppo.types import Message

ENVIRONMENT_REWARD = "environment_reward"
"""Column in which reward functions find what the environment gave."""

ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}."""

COLUMN = "environment"
"""Column of the data that names a row's environment, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an environment says to one turn of the policy."""

    messages: tuple[Message, ...] = ()
    """What follows the turn; empty: the episode is over."""
    reward: float | None = None
    """Reward of this turn."""
    is_over: bool = False
    """True if the environment ends the episode, whatever `messages` says."""


class Environment:
    """Base class: one episode at a time, begun by `reset`. An instance plays many episodes, one after the other.

    Each method may be `async`; one that is not runs in a thread.
    """

    tools: Sequence[ToolSchema] = ()
    """Tools that the chat template tells the model of."""
    gives_reward: bool = False
    """True if `Answer.reward` or `reward` rewards the episode; a run then reads it as the reward `environment`."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin an episode.

        Args:
            row: the columns of the data set's row, with its `prompt`.
            seed: the same for all episodes of a group.

        Returns:
            The messages of the prompt, or None for the row's own.
        """
        return None

    def step(self, message: Message) -> Any:
        """The `Answer` to a turn of the policy; `message` is that turn, with its tool calls read."""
        raise NotImplementedError

    def reward(self) -> Any:
        """Reward of the whole episode once it is over, beside those of its turns; None: none."""
        return None

    def close(self) -> Any:
        """Release what the environment holds. No episode follows."""
        return None


@dataclass(frozen=True, slots=True)
class Environments:
    """The environments of a run: one, or several by name, which a column of the data chooses among."""

    factories: Mapping[str, Callable[[], Environment]]
    """By the value of the column `environment`; a single one has the name "" and needs no column."""
    tools: Mapping[str, Sequence[ToolSchema]]
    """The tools of each, which prompts are rendered with."""
    gives_reward: bool = False
    """Whether any of them rewards its episodes."""

    def key(self, columns: Mapping[str, Any]) -> str:
        """The name of the environment of a row."""
        if "" in self.factories:
            return ""
        names = ", ".join(self.factories)
        if COLUMN not in columns:
            raise InputError(
                f"the data has no column {COLUMN!r}, which chooses among the environments {names}; add it, with "
                "one of these names in each row, or give one environment instead of several"
            )
        if (name := columns[COLUMN]) not in self.factories:
            hint = did_you_mean(str(name), self.factories)
            raise InputError(f"a row has {COLUMN}={name!r}{hint}; the environments are {names}")
        return name

    def tools_of(self, columns: Mapping[str, Any]) -> Sequence[ToolSchema]:
        """The tools of a row's environment."""
        return self.tools[self.key(columns)]
