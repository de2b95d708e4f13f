"""Rows of a data set, checked: from a file, a list, a `datasets.Dataset` or the hub.

    >>> rows = read_rows([{"prompt": "1+1=", "answer": "2"}, {"prompt": None}], on_bad_row="drop")
    >>> rows[0]
    {'prompt': '1+1=', 'answer': '2'}
    >>> rows.dropped
    (DroppedRow(row='rows[1]', reason='prompt is null'),)

Every row that comes out has a usable `prompt`. Rendering and tokenising it is `gruppo.task.prompts`'s part.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gruppo.errors import InputError
from gruppo.task.reader import Record, load_hub, read_file, read_objects
from gruppo.task.row import find_problem, prompt_kind

BadRowPolicy = Literal["fail", "drop"]
"""`fail`: the first bad row ends the reading with an error. `drop`: bad rows are left out and listed."""

BAD_ROW_REMEDY = "fix it, or leave bad rows out with on_bad_row='drop'"


class DroppedRow(NamedTuple):
    """A row that was left out: where it stands, and why."""

    row: str
    reason: str


class TooLongRow(DroppedRow):
    """A row that was left out for its length alone; the data is not at fault."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A usable row and where it came from."""

    values: dict[str, Any]
    index: int
    """Number of the record in the source, from 0, bad ones counted."""
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The usable rows of a source, and those that are not. Indexing and iterating give plain dicts."""

    rows: tuple[Row, ...]
    dropped: tuple[DroppedRow, ...] = ()
    source: str = "rows"
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Columns that go by another name than in the source, e.g. {"question": "prompt"}."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index].values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row.values for row in self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))


def read_rows(
    source: Any,
    *,
    on_bad_row: BadRowPolicy = "fail",
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
    label: str = "rows",
) -> Rows:
    """Reads and checks all rows of a source.

    Args:
        source: a path ending in .jsonl, .csv or .parquet; `hf://org/name[/config][@revision][:split]` (split
            `train` when not named); a `datasets.Dataset`; or a list of dicts.
        prompt_column: the column that becomes `prompt`. When it is left at `prompt` and there is no such
            column, `question` is taken.
        column_map: other names for columns, old to new: `{"problem": "prompt", "solution": "answer"}`.
        label: how errors call a source that has no name of its own.
    """
    if on_bad_row not in ("fail", "drop"):
        raise InputError(f"on_bad_row must be 'fail' or 'drop', got {on_bad_row!r}")
    label, records = _open(source, label)
    records = list(records)
    names = dict.fromkeys(name for record in records if record.values for name in record.values)
    renamed = _renames(names, prompt_column, dict(column_map or {}), label) if names else {}

    rows, dropped, kind = [], [], None
    for index, record in enumerate(records):
        reason = record.problem
        if record.values is not None:
            values = {renamed.get(name, name): value for name, value in record.values.items()}
            reason = find_problem(values)
            if not reason:
                kind = kind or prompt_kind(values["prompt"])
                if prompt_kind(values["prompt"]) == kind:
                    rows.append(Row(values=values, index=index, place=record.place))
                    continue
                # Half of the prompts with a chat template and half without would be a mistake nobody sees.
                reason = f"prompt is a {prompt_kind(values['prompt'])}, those of the rows before are {kind}s"
        dropped.append(DroppedRow(record.place, reason))
    check_dropped(label, dropped, len(records), on_bad_row)
    return Rows(rows=tuple(rows), dropped=tuple(dropped), source=label, renamed=renamed)


def check_dropped(label: str, dropped: list[DroppedRow], total: int, on_bad_row: BadRowPolicy) -> None:
    """Raises when the bad rows of a source are more than the policy allows, or all there is."""
    if total == 0:
        raise InputError(f"{label} has no rows")
    if dropped and on_bad_row == "fail":
        more = f" (the first of {len(dropped)} bad rows of {total})" if len(dropped) > 1 else ""
        raise InputError(f"{dropped[0].row}: {dropped[0].reason}{more}; {BAD_ROW_REMEDY}")
    if len(dropped) == total:
        raise InputError(f"{label} has no usable row; {dropped[0].row}: {dropped[0].reason}")


def _renames(names: Mapping[str, Any], prompt_column: str, column_map: dict[str, str], label: str) -> dict[str, str]:
    """Old to new column names, checked against the names there are."""
    listed = ", ".join(map(repr, names))
    renames = dict(column_map)
    if prompt_column != "prompt":
        renames[prompt_column] = "prompt"
    for old in renames:
        if old not in names:
            raise InputError(f"{label} has no column {old!r}; it has {listed}")
    after = [renames.get(name, name) for name in names]
    if "prompt" not in after:
        if "question" not in after:
            raise InputError(
                f"{label} has no column 'prompt' (nor 'question'); it has {listed}. "
                f"Name the one to use: column_map={{{next(iter(names))!r}: 'prompt'}}"
            )
        source = next(name for name in names if renames.get(name, name) == "question")
        renames[source] = "prompt"
        after = [renames.get(name, name) for name in names]
    for name in after:
        if after.count(name) > 1:
            raise InputError(f"{label}: two columns would be called {name!r}; it has {listed}, renamed {renames}")
    return renames


def _open(source: Any, label: str) -> tuple[str, Iterable[Record]]:
    """A name for error texts, and the records."""
    if isinstance(source, str) and source.startswith("hf://"):
        return source, read_objects(load_hub(source), source)
    if isinstance(source, str | os.PathLike):
        path = _check_path(source)
        return str(path), read_file(path)
    if isinstance(source, list | tuple):
        return label, read_objects(source, label)
    # `datasets` is an optional dependency: its objects are known by what they offer.
    column_names = getattr(source, "column_names", None)
    if isinstance(column_names, Mapping):
        raise InputError(f"got a data set with splits {', '.join(column_names)}; pass one: data['train']")
    if column_names is not None and hasattr(source, "__len__"):
        return label, read_objects(source, label)
    raise InputError(
        f"rows must be a path, an hf:// name, a datasets.Dataset or a list of dicts, got {type(source).__name__}"
    )


def _check_path(source: str | os.PathLike[str]) -> Path:
    try:
        path = Path(source).expanduser()
        is_file, exists = path.is_file(), path.exists()
        unusable = "it contains a NUL character" if "\0" in str(path) else None
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a home that does not exist
        raise InputError(f"{str(source)[:80]!r} is not a usable path: {error}") from error
    if unusable:
        raise InputError(f"{str(source)[:80]!r} is not a usable path: {unusable}")
    if not exists:
        raise InputError(f"no such file: {path}")
    if not is_file:
        raise InputError(f"{path} is not a file; name a .jsonl, .csv or .parquet file")
    return path
