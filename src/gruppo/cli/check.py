"""`gruppo data check` and `gruppo reward check`: look before a GPU is touched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from gruppo.cli.options import parse


@dataclass
class DataArguments:
    source: tyro.conf.Positional[str]
    """A .jsonl, .csv or .parquet file, or any other source of `gruppo train --data`."""
    model: str | None = None
    """Measure lengths in this model's tokens instead of characters."""
    prompt_column: str = "prompt"
    max_prompt_tokens: int | None = None
    system: str | None = None
    on_bad_row: Literal["fail", "drop"] = "fail"


def data_check(arguments: Sequence[str]) -> int:
    given = parse(
        DataArguments,
        arguments,
        verb="data check",
        description="What a data set holds: rows, columns, lengths, duplicates, which rows would be dropped and why, "
        "and three prompts as the model would see them.\n\n  gruppo data check problems.jsonl --model Qwen/Qwen3-0.6B",
    )
    from gruppo.cli.data_check import check_data

    return check_data(
        given.source,
        model=given.model,
        prompt_column=given.prompt_column,
        max_prompt_tokens=given.max_prompt_tokens,
        system=given.system,
        on_bad_row=given.on_bad_row,
    )


@dataclass
class RewardArguments:
    reward: tyro.conf.Positional[str]
    """A built-in name, or module:function."""
    data: str | None = None
    """Rows to take answers and columns from."""
    answer_column: str = "answer"
    """The column with the right answer."""
    template: str = "{answer}"
    """How a right completion looks, e.g. '#### {answer}'."""
    num_rows: int = 16
    deadline: float = 10.0
    """Seconds per completion before its process is killed."""


def reward_check(arguments: Sequence[str]) -> int:
    given = parse(
        RewardArguments,
        arguments,
        verb="reward check",
        description="Run a reward on good, bad, empty and huge completions and report what it gives, how long it takes "
        "and what fails.\n\n  gruppo reward check number_match --data problems.jsonl",
    )
    from gruppo.cli.reward_check import check_reward

    return check_reward(
        given.reward,
        given.data,
        answer_column=given.answer_column,
        template=given.template,
        num_rows=given.num_rows,
        deadline_s=given.deadline,
    )
