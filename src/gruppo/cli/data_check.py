"""`gruppo data check FILE`: a report on a data set before a model sees it.

The text of a data set is not trusted: control characters are shown as escapes and never sent to the terminal.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gruppo.cli.arguments import Arguments, Word, parse_options
from gruppo.errors import GruppoError, InputError
from gruppo.process.streams import printable
from gruppo.task.dataset import DroppedRow, Rows, TooLongRow
from gruppo.task.prompts import PromptSet, check_columns, load_prompts
from gruppo.task.sources import resolve_source
from gruppo.trainer.config import TrainConfig

PERCENTILES = (0, 50, 90, 99, 100)
NUM_SHOWN = 3
MAX_SHOWN_CHARACTERS = 600
MAX_REASONS = 10

Lines = list[tuple[str, str]]
"""Name and value of each line of a section."""


class DataCheckArguments(Arguments):
    """Report on a data set: rows, columns, lengths, duplicates, which rows would be dropped and why, and three prompts
    as the model would see them. Lengths are in characters, with --model in tokens; prompts that then leave no room in
    its context for --max-new-tokens (here 1, if not given) are reported.

    gruppo data check problems.jsonl --model Qwen/Qwen3-0.6B
    """

    source: Annotated[str, Word("SOURCE", is_positional=True)]
    """A .jsonl, .csv or .parquet file, or any other source of `gruppo train --data`."""


CHECK_OPTIONS = (
    *("model", "prompt_column", "answer_column", "column_map", "max_prompt_tokens", "max_new_tokens", "chat"),
    *("system", "chat_template_kwargs", "on_bad_row"),
)


def data_check(arguments: Sequence[str]) -> int:
    given, options = parse_options(DataCheckArguments, arguments, "data check", CHECK_OPTIONS)
    return check_data(given.source, options)


def check_data(source: Any, options: Mapping[str, Any], console: Console | None = None) -> int:
    """Print the report; 0 when training would accept the data, 2 when it would not.

    All bad rows are listed whatever `on_bad_row` is; it decides whether they make the exit code 2, as they would end a
    training run.
    """
    console = console or Console()
    try:
        config = TrainConfig.read({"max_new_tokens": 1} | dict(options), where="data check")
        columns = config.column_map | ({} if config.answer_column == "answer" else {config.answer_column: "answer"})
        reading: Any = {"prompt_column": config.prompt_column, "column_map": columns}
        rows = resolve_source(source, on_bad_row="drop", **reading)
        check_columns(rows)
        prompts, longest, unknown_id = None, None, None
        if "model" in options:
            from gruppo.sampler.base import check_ids
            from gruppo.weights.source import load_tokenizer, longest_prompt, vocabulary_size

            tokenizer = load_tokenizer(config.model)
            unknown_id = getattr(tokenizer, "unk_token_id", None)
            longest = longest_prompt(config.model, config.max_new_tokens, config.max_prompt_tokens)
            prompts = load_prompts(
                rows,
                tokenizer,
                max_prompt_tokens=longest,
                chat=config.chat,
                system=config.system,
                chat_template_kwargs=config.chat_template_kwargs,
                on_bad_row="drop",
            )
            check_ids(prompts.prompts, vocabulary_size(config.model), tokenizer)
        elif config.chat or config.system or config.chat_template_kwargs or config.max_prompt_tokens:
            raise InputError("chat, system, chat_template_kwargs and max_prompt_tokens need a tokenizer; give --model")
    except GruppoError as error:
        text = f"error: {_printable(console, str(error))}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return error.exit_code
    dropped = rows.dropped if prompts is None else prompts.dropped
    texts = [_plain(row["prompt"]) for row in rows] if prompts is None else [prompt.text for prompt in prompts]
    _print(console, "data", _summary(rows, prompts, dropped, longest))
    _print(console, "columns", _columns(rows))
    _print(console, "prompt length", _lengths(texts, prompts, unknown_id))
    # The first rows by name, the rest as a count: a file may be bad throughout.
    reasons = [(row, reason) for row, reason in dropped[:MAX_REASONS]]
    if len(dropped) > MAX_REASONS:
        reasons.append(("and", f"{len(dropped) - MAX_REASONS:,} more"))
    _print(console, "rows left out", reasons or [("", "none")])
    for number, text in enumerate(texts[:NUM_SHOWN], start=1):
        more = len(text) - MAX_SHOWN_CHARACTERS
        shown = text if more <= 0 else f"{text[:MAX_SHOWN_CHARACTERS]} ... ({more:,} more characters)"
        _print(console, f"prompt {number} of {len(texts):,}", [("", shown)])
    is_bad = any(not isinstance(row, TooLongRow) for row in dropped)
    return 2 if is_bad and config.on_bad_row == "fail" else 0


def _summary(rows: Rows, prompts: PromptSet | None, dropped: Sequence[DroppedRow], longest: int | None) -> Lines:
    total = len(rows) + len(rows.dropped)
    by_prompt: dict[str, set[str]] = {}
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "prompt"}
        by_prompt.setdefault(_key(row["prompt"]), set()).add(_key(rest))
    differing = sum(len(others) > 1 for others in by_prompt.values())
    note = f"; {differing:,} prompts have rows that differ in other columns" if differing else ""
    num_long = sum(isinstance(row, TooLongRow) for row in dropped)
    return [
        ("source", rows.source),
        ("rows", f"{total:,}"),
        ("usable", f"{total - len(dropped):,}"),
        *([("too long", f"{num_long:,} prompts have more than {longest:,} tokens")] if num_long else []),
        *(("renamed", sentence) for sentence in rows.recognised()),
        *(("template", sentence) for sentence in (prompts.reading if prompts else ())[len(rows.recognised()) :]),
        ("duplicates", f"{len(rows) - len(by_prompt):,} rows repeat the prompt of another{note}"),
    ]


def _columns(rows: Rows) -> Lines:
    lines = []
    for name in rows.columns:
        types = Counter(type(row[name]).__name__ if name in row else "missing" for row in rows)
        lines.append((name, ", ".join(f"{kind} ({count:,})" for kind, count in types.most_common())))
    return lines


def _lengths(texts: Sequence[str], prompts: PromptSet | None, unknown_id: int | None) -> Lines:
    unit = "characters" if prompts is None else "tokens"
    lengths = sorted(map(len, texts if prompts is None else [prompt.token_ids for prompt in prompts]))
    lines = []
    for percent in PERCENTILES:
        # Nearest rank: the smallest length that at least `percent` % of the prompts do not exceed.
        length = lengths[max(0, -(-percent * len(lengths) // 100) - 1)]
        name = {0: "shortest", 50: "median", 100: "longest"}.get(percent, f"{percent} %")
        lines.append((name, f"{length:,} {unit}"))
    unknown = 0 if unknown_id is None else sum(unknown_id in prompt.token_ids for prompt in prompts or ())
    if unknown:
        lines.append(("unknown", f"{unknown:,} prompts hold text that the tokenizer does not know"))
    return lines


def _print(console: Console, title: str, lines: Lines) -> None:
    safe = [(_printable(console, name), _printable(console, value)) for name, value in lines]
    if not console.is_terminal:  # for pipes and logs: one fact per line, nothing to draw
        lines_of_text = [f"{name}: {value}".removeprefix(": ").replace("\n", "\n  ") for name, value in safe]
        console.print("\n  ".join([f"{title}:", *lines_of_text]), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(title, style="bold"))
    table = Table(show_header=False)
    has_names = any(name for name, _ in safe)
    for name, value in safe:
        table.add_row(*([Text(name)] if has_names else []), Text(value, overflow="fold"))
    console.print(table)


def _printable(console: Console, text: str) -> str:
    """Safe, and within what the output can encode: a log in ASCII must not end the report."""
    return printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
