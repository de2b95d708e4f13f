"""Sources of prompts by name (docs/data.md lists them), and the rows that each name stands for."""

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qsl

from gruppo.errors import InputError
from gruppo.task.calculator import calculator_rows
from gruppo.task.carries import carries_rows, sums_rows
from gruppo.task.dataset import BadRowPolicy, Rows, read_rows
from gruppo.task.reasoning_gym import reasoning_gym_rows

GSM8K_INSTRUCTION = "Solve the problem step by step. End with a line that holds only #### and the final number."

BUILTIN = {"carries": carries_rows, "sums": sums_rows, "calculator": calculator_rows}
REWARDS = {
    "gsm8k": "number_match",
    "reasoning_gym": "gruppo.task.reasoning_gym:score",
    "builtin:sums": "number_match",
}
"""Rewards that read the answers of a source; those of other sources are compared as text."""

Style = Literal["chat", "plain"]


def default_reward(spec: Any) -> str:
    """The reward of a source, for a run that names none.

    >>> default_reward("gsm8k:train.jsonl"), default_reward("problems.jsonl")
    ('number_match', 'exact_match')
    """
    if not isinstance(spec, str):
        return "exact_match"
    return REWARDS.get(spec.partition("?")[0], REWARDS.get(spec.partition(":")[0], "exact_match"))


def resolve_source(
    spec: Any,
    *,
    on_bad_row: BadRowPolicy = "fail",
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
) -> Rows:
    """The checked rows of `builtin:...`, `gsm8k:...`, `reasoning_gym:...`, `Rows`, or of what `read_rows` takes."""
    if isinstance(spec, Rows):
        if prompt_column != "prompt" or column_map:
            raise InputError(
                f"{spec.source}: these rows were read before, and prompt_column, answer_column and column_map do not "
                "apply; give them to read_rows"
            )
        return spec
    kind, colon, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if not colon or kind not in ("builtin", "gsm8k", "reasoning_gym"):
        return read_rows(spec, on_bad_row=on_bad_row, prompt_column=prompt_column, column_map=column_map)
    if prompt_column != "prompt" or column_map:
        raise InputError(f"{spec}: this task has its own columns; prompt_column and column_map do not apply")
    if kind == "reasoning_gym":
        return read_rows(reasoning_gym_rows(rest), on_bad_row=on_bad_row, label=f"reasoning_gym:{rest}")
    if kind == "gsm8k":
        path, options = _split_options(rest, "style")
        return gsm8k_rows(path, style=options.get("style", "chat"), on_bad_row=on_bad_row)
    name, options = _split_options(rest, "split")
    if name not in BUILTIN:
        raise InputError(
            f"there is no built-in task {name!r}; there are {', '.join(f'builtin:{task}' for task in BUILTIN)}"
        )
    return read_rows(BUILTIN[name](options.get("split", "train")), label=f"builtin:{rest}")


def _split_options(rest: str, known: str) -> tuple[str, dict[str, Any]]:
    """`name?key=value` as the name and its one possible option."""
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if options.keys() - {known} or (query and not options):
        raise InputError(f"{rest!r}: the only option is {known}, written ?{known}=...")
    return name, options


def gsm8k_prompt(question: str, style: Style = "chat") -> str | list[dict[str, str]]:
    """The question with the instruction: a conversation, or text that ends where the solution begins."""
    if style == "chat":
        return [{"role": "user", "content": f"{question}\n\n{GSM8K_INSTRUCTION}"}]
    if style == "plain":
        return f"{GSM8K_INSTRUCTION}\n\nProblem: {question}\nSolution:"
    raise InputError(f"style must be 'chat' or 'plain', got {style!r}")


def gsm8k_rows(source: Any, *, style: Style = "chat", on_bad_row: BadRowPolicy = "fail") -> Rows:
    """Rows with `prompt` and whole `answer` from anything that `read_rows` reads and that has GSM8K's columns."""

    def convert(values: dict[str, Any]) -> dict[str, Any] | str:
        question, answer = values["prompt"], values.get("answer")
        if not isinstance(question, str):
            return "question must be a string"
        if not isinstance(answer, str) or "####" not in answer:
            return "answer must be text with '#### number'"
        return values | {"prompt": gsm8k_prompt(question, style)}

    return read_rows(source, prompt_column="question", on_bad_row=on_bad_row, label="gsm8k", convert=convert)
