"""Procedural tasks of `reasoning-gym` (extra `tasks`): rows by name, and the data set's own scorer as reward."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from gruppo.errors import InputError, require
from gruppo.reward.verifiers import completion_texts, text_inside

INSTRUCTION = "Put the final answer, and nothing else, between <answer> and </answer>."


def reasoning_gym_rows(spec: str) -> list[dict[str, Any]]:
    """Rows of a data set named as `NAME?size=..&seed=..`; what follows `?` goes to its configuration."""
    return [
        {
            "prompt": f"{entry['question'].rstrip()}\n\n{INSTRUCTION}",
            "answer": entry["answer"],
            "question": entry["question"],
            "metadata": entry["metadata"],
            "reasoning_gym": spec,
        }
        for entry in _dataset(spec)
    ]


def score(
    completions: Sequence[Any],
    question: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[Mapping[str, Any]],
    reasoning_gym: Sequence[str],
    **_: Any,
) -> list[float]:
    """Reward: the data set's score, 0 to 1, of the last `<answer>...</answer>` of each completion."""
    scores = []
    rows = zip(completion_texts(completions), question, answer, metadata, reasoning_gym, strict=True)
    for text, q, a, m, spec in rows:
        entry = {"question": q, "answer": a, "metadata": m}
        inside = text_inside(text, "answer")
        scores.append(float(_dataset(spec).score_answer(None if inside is None else inside.strip(), entry)))
    return scores


score.decides_correctness = True  # pyright: ignore[reportFunctionMemberAccess]  read by RewardScorer


@lru_cache(maxsize=8)
def _dataset(spec: str) -> Any:
    try:
        gym = import_module("reasoning_gym")  # by name: this module is called the same
    except ImportError as error:
        raise require("tasks", "reasoning_gym", f"the task reasoning_gym:{spec}") from error
    name, _, query = spec.partition("?")
    # reasoning-gym draws a seed when none is given; a data set must be the same on every start.
    options: dict[str, Any] = {"size": 1000, "seed": 0}
    options |= {key: _parse(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    try:
        return gym.create_dataset(name, **options)
    except (ValueError, TypeError, AssertionError) as error:  # unknown name, unknown or refused option
        raise InputError(f"reasoning_gym:{spec} cannot be made: {error}") from error


def _parse(text: str) -> Any:
    """A value as JSON has it; other text is itself."""
    try:
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text
