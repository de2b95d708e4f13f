"""From the name of a source to its rows: the one place that knows all of them.

    builtin:carries[?split=train|heldout|all]         the embedded task
    gsm8k:PATH[?style=chat|plain]                     GSM8K's columns, from a file or hf:// name
    reasoning_gym:NAME[?size=..&seed=..&...]          a procedural task (extra `tasks`)
    hf://org/name[/config][@revision][:split]         the hub (extra `data`)
    a path ending in .jsonl, .csv or .parquet
    a list of dicts, a datasets.Dataset, or Rows

A new kind of source is a function that gives `Rows` and one more branch here.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from gruppo.errors import InputError
from gruppo.task.carries import carries_rows
from gruppo.task.dataset import BadRowPolicy, Rows, read_rows
from gruppo.task.gsm8k import gsm8k_rows
from gruppo.task.reasoning_gym import reasoning_gym_rows


def resolve_source(
    spec: Any,
    *,
    on_bad_row: BadRowPolicy = "fail",
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
) -> Rows:
    """The rows that a spec names, checked. `prompt_column` and `column_map` as in `read_rows`."""
    if isinstance(spec, Rows):
        return spec
    kind, colon, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if colon and kind in ("builtin", "gsm8k", "reasoning_gym"):
        if prompt_column != "prompt" or column_map:
            raise InputError(f"{spec}: this task has its own columns; prompt_column and column_map do not apply")
        return _read_task(kind, rest, on_bad_row)
    return read_rows(spec, on_bad_row=on_bad_row, prompt_column=prompt_column, column_map=column_map)


def _read_task(kind: str, rest: str, on_bad_row: BadRowPolicy) -> Rows:
    if kind == "reasoning_gym":
        return read_rows(reasoning_gym_rows(rest), on_bad_row=on_bad_row, label=f"reasoning_gym:{rest}")
    if kind == "gsm8k":
        path, options = _split_options(rest, "style")
        return gsm8k_rows(path, style=options.get("style", "chat"), on_bad_row=on_bad_row)
    name, options = _split_options(rest, "split")
    if name != "carries":
        raise InputError(f"there is no built-in task {name!r}; there is builtin:carries")
    return read_rows(carries_rows(options.get("split", "train")), label=f"builtin:{rest}")


def _split_options(rest: str, known: str) -> tuple[str, dict[str, Any]]:
    """`name?key=value` as the name and its one possible option."""
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = options.keys() - {known}
    if unknown or (query and not options):
        raise InputError(f"{rest!r}: the only option is {known}, written ?{known}=...")
    return name, options
