"""`gruppo data check FILE`: a report on a data set before a model sees it.

Rows, columns, lengths, rows that would be left out and why, duplicates, and three prompts as the model would see them.
The text of a data set is not trusted: control characters are shown as escapes and never sent to the terminal.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tyro

from gruppo.cli.options import parse
from gruppo.errors import GruppoError
from gruppo.run.console import printable
from gruppo.task.dataset import BadRowPolicy, DroppedRow, Rows, TooLongRow
from gruppo.task.load import resolve_source
from gruppo.task.prompts import PromptSet, load_prompts

if TYPE_CHECKING:
    from rich.console import Console

PERCENTILES = (0, 50, 90, 99, 100)
NUM_SHOWN = 3
MAX_SHOWN_CHARACTERS = 600
MAX_REASONS = 10

Section = tuple[str, Sequence[tuple[str, str]]]
"""A title, and lines of name and value."""


@dataclass
class DataCheckArguments:
    source: tyro.conf.Positional[str]
    """A .jsonl, .csv or .parquet file, or any other source of `gruppo train --data`."""
    model: str | None = None
    """Measure lengths in this model's tokens instead of characters."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    max_prompt_tokens: int | None = None
    """Report prompts that are longer; training drops them. It needs --model."""
    system: str | None = None
    """System message put before every chat prompt."""
    on_bad_row: BadRowPolicy = "fail"
    """Whether rows that cannot be used make the check fail."""


def data_check(arguments: Sequence[str]) -> int:
    given = parse(
        DataCheckArguments,
        arguments,
        verb="data check",
        description="What a data set holds: rows, columns, lengths, duplicates, which rows would be dropped and why, "
        "and three prompts as the model would see them.\n\n  gruppo data check problems.jsonl --model Qwen/Qwen3-0.6B",
    )
    return check_data(given)


def check_data(given: DataCheckArguments, console: "Console | None" = None) -> int:
    """Print the report; 0 when training would accept the data, 2 when it would not.

    All bad rows are listed whatever `on_bad_row` is; it decides whether they make the exit code 2, as they would end a
    training run.
    """
    from rich.console import Console

    console = console or Console()
    try:
        rows = resolve_source(given.source, on_bad_row="drop", prompt_column=given.prompt_column)
        prompts, tokenizer = None, None
        if given.model is not None:
            from gruppo.weights.source import load_tokenizer

            tokenizer = load_tokenizer(given.model)
            longest = given.max_prompt_tokens
            prompts = load_prompts(rows, tokenizer, max_prompt_tokens=longest, system=given.system, on_bad_row="drop")
    except GruppoError as error:
        text = f"error: {_printable(console, str(error))}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    dropped = rows.dropped if prompts is None else prompts.dropped
    sections = [
        ("data", _summary(rows, dropped)),
        ("columns", _columns(rows)),
        ("prompt length", _lengths(rows, prompts, getattr(tokenizer, "unk_token_id", None))),
        ("rows left out", _reasons(dropped)),
        *_shown(rows, prompts),
    ]
    for section in sections:
        _print(console, section)
    is_bad = any(not isinstance(row, TooLongRow) for row in dropped)
    return 2 if is_bad and given.on_bad_row == "fail" else 0


def _summary(rows: Rows, dropped: Sequence[DroppedRow]) -> list[tuple[str, str]]:
    usable = len(rows) + len(rows.dropped) - len(dropped)
    lines = [
        ("source", rows.source),
        ("rows", f"{len(rows) + len(rows.dropped):,}"),
        ("usable", f"{usable:,}"),
    ]
    lines += [("renamed", f"{old} is read as {new}") for old, new in rows.renamed.items()]
    by_prompt: dict[str, set[str]] = {}
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "prompt"}
        by_prompt.setdefault(_key(row["prompt"]), set()).add(_key(rest))
    repeats = len(rows) - len(by_prompt)
    differing = sum(len(others) > 1 for others in by_prompt.values())
    note = f"; {differing:,} prompts have rows that differ in other columns" if differing else ""
    return [*lines, ("duplicates", f"{repeats:,} rows repeat the prompt of another{note}")]


def _columns(rows: Rows) -> list[tuple[str, str]]:
    lines = []
    for name in rows.columns:
        types = Counter(type(row[name]).__name__ if name in row else "missing" for row in rows)
        lines.append((name, ", ".join(f"{kind} ({count:,})" for kind, count in types.most_common())))
    return lines


def _lengths(rows: Rows, prompts: PromptSet | None, unknown_id: int | None) -> list[tuple[str, str]]:
    if prompts is None:
        unit, lengths = "characters", sorted(len(_plain(row["prompt"])) for row in rows)
    else:
        unit, lengths = "tokens", sorted(len(prompt.token_ids) for prompt in prompts)
    names = {0: "shortest", 50: "median", 100: "longest"}
    lines = [(names.get(p, f"{p} %"), f"{_percentile(lengths, p):,} {unit}") for p in PERCENTILES]
    if prompts is not None and unknown_id is not None:
        unknown = sum(unknown_id in prompt.token_ids for prompt in prompts)
        if unknown:
            lines.append(("unknown", f"{unknown:,} prompts hold text that the tokenizer does not know"))
    return lines


def _reasons(dropped: Sequence[DroppedRow]) -> list[tuple[str, str]]:
    """The first rows by name, the rest as a count: a file may be bad throughout."""
    lines = [(row, reason) for row, reason in dropped[:MAX_REASONS]]
    if len(dropped) > MAX_REASONS:
        lines.append(("and", f"{len(dropped) - MAX_REASONS:,} more"))
    return lines or [("", "none")]


def _shown(rows: Rows, prompts: PromptSet | None) -> list[Section]:
    texts = [_plain(row["prompt"]) for row in rows] if prompts is None else [prompt.text for prompt in prompts]
    return [
        (f"prompt {number} of {len(texts):,}", [("", _shorten(text))])
        for number, text in enumerate(texts[:NUM_SHOWN], start=1)
    ]


def _print(console: "Console", section: Section) -> None:
    from rich.table import Table
    from rich.text import Text

    title, lines = section
    safe = [(_printable(console, name), _printable(console, value)) for name, value in lines]
    if not console.is_terminal:  # for pipes and logs: one fact per line, nothing to draw
        console.print(f"{title}:", markup=False, highlight=False, soft_wrap=True)
        for name, value in safe:
            text = f"{name}: {value}".removeprefix(": ").replace("\n", "\n  ")
            console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(title, style="bold"))
    table = Table(show_header=False)
    table.add_column()
    if any(name for name, _ in safe):
        table.add_column(overflow="fold")
    for name, value in safe:
        table.add_row(*([Text(name), Text(value)] if len(table.columns) == 2 else [Text(value)]))
    console.print(table)


def _printable(console: "Console", text: str) -> str:
    """Safe, and within what the output can encode: a log in ASCII must not end the report."""
    return printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """Nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _shorten(text: str) -> str:
    more = len(text) - MAX_SHOWN_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_SHOWN_CHARACTERS]} ... ({more:,} more characters)"
