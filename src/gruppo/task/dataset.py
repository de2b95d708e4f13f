"""Rows of a data set, checked: from a file, a list, a `datasets.Dataset` or the hub.

    >>> rows = read_rows([{"prompt": "1+1=", "answer": "2"}, {"prompt": None}], on_bad_row="drop")
    >>> rows[0]
    {'prompt': '1+1=', 'answer': '2'}
    >>> rows.dropped
    (DroppedRow(row='rows[1]', reason='prompt is null'),)

A row has a `prompt`: a string, or a list of messages with `role` and `content`. All other columns are free, but their
text must be storable.
"""

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gruppo.errors import InputError
from gruppo.task.reader import Record, load_hub, read_file, read_objects

BadRowPolicy = Literal["fail", "drop"]
"""`fail`: the first bad row ends the reading with an error. `drop`: bad rows are left out and listed."""

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")
"""Column names for the right answer; the first that exists counts. The last is verl's."""

LIKELY_PROMPTS = ("problem", "messages", "input", "instruction", "query")
"""Names under which data sets keep prompts, for errors: a column of such a name may also be something else."""

BAD_ROW_REMEDY = "fix it, or leave bad rows out with on_bad_row='drop' (--on-bad-row drop)"


class DroppedRow(NamedTuple):
    """A dropped row: its place, and the reason."""

    row: str
    reason: str


class TooLongRow(DroppedRow):
    """A row dropped only for its length; the data is not at fault."""

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
    answer_from: str | None = None
    """The column that `answer` is a copy of, where the source has none of that name."""

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

    def recognised(self) -> list[str]:
        """A sentence for each column read under another name.

        >>> read_rows([{"question": "1+1=", "ground_truth": "2", "solution": "It is 2."}]).recognised()
        ['question is read as prompt', 'ground_truth is read as answer, not solution']
        """
        sentences = [f"{old} is read as {new}" for old, new in self.renamed.items()]
        if self.answer_from is not None and self.renamed.get(self.answer_from) != "answer":
            others = [name for name in ANSWERS[1:] if name in self.columns and name != self.answer_from]
            sentences.append(f"{self.answer_from} is read as answer" + "".join(f", not {name}" for name in others))
        return sentences


def read_rows(
    source: Any,
    *,
    on_bad_row: BadRowPolicy = "fail",
    prompt_column: str = "prompt",
    column_map: Mapping[str, str] | None = None,
    label: str = "rows",
) -> Rows:
    """Reads and checks all rows of a source.

    Where there is no column `answer`, `ground_truth`, `solution` or verl's `reward_model.ground_truth` is read as the
    answer. It keeps its own name too: reward functions of other trainers take it by that.

    A column inside another has a dotted name: `reward_model.ground_truth`. The outer one stays as it is.

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
    label, opened = _open(source, label)
    records = list(opened)
    found = [read for _, read in records if not isinstance(read, str)]
    names = dict.fromkeys(name for read in found for name in read)
    asked = [name for name in (prompt_column, *(column_map or {}), *ANSWERS) if name not in names]
    inner = _inner_names(found, asked)
    renamed = _renames(names, inner, prompt_column, dict(column_map or {}), label) if names else {}
    columns = {renamed.get(name, name) for name in names} | inner.keys()
    answer_from = next((name for name in ANSWERS if name in columns), "answer")

    rows: list[Row] = []
    dropped: list[DroppedRow] = []
    for index, (place, read) in enumerate(records):
        if isinstance(read, str):
            dropped.append(DroppedRow(place, read))
            continue
        values = {renamed.get(name, name): value for name, value in read.items()}
        values |= {new: _inside(read, old) for old, new in renamed.items() if old in inner}
        if answer_from in inner:
            values["answer"] = _inside(read, answer_from)
        elif answer_from != "answer" and answer_from in values:
            values["answer"] = values[answer_from]
        problem = prompt_problem(values) or text_problem(values)
        if problem is None and rows:
            kind, before = prompt_kind(values["prompt"]), prompt_kind(rows[0].values["prompt"])
            if kind != before:
                # Half of the prompts with a chat template and half without would be a silent mistake.
                problem = f"prompt is a {kind}, those of the rows before are {before}s"
        if problem is None:
            rows.append(Row(values=values, index=index, place=place))
        else:
            dropped.append(DroppedRow(place, problem))
    check_dropped(label, dropped, len(records), on_bad_row)
    copied = None if answer_from == "answer" else answer_from
    return Rows(rows=tuple(rows), dropped=tuple(dropped), source=label, renamed=renamed, answer_from=copied)


def check_dropped(label: str, dropped: list[DroppedRow], total: int, on_bad_row: BadRowPolicy) -> None:
    """Raises when a source has bad rows that the policy does not allow, or no other."""
    if total == 0:
        raise InputError(
            "The data set is empty." if label == "rows" else f"{label} has no rows; choose a file that contains some"
        )
    if dropped and on_bad_row == "fail":
        more = f" (the first of {len(dropped)} bad rows of {total})" if len(dropped) > 1 else ""
        raise InputError(f"{dropped[0].row}: {dropped[0].reason}{more}; {BAD_ROW_REMEDY}")
    if len(dropped) == total:
        raise InputError(f"{label} has no usable row; {dropped[0].row}: {dropped[0].reason}")


def _renames(
    names: Mapping[str, Any], inner: Mapping[str, Any], prompt_column: str, column_map: dict[str, str], label: str
) -> dict[str, str]:
    """Old to new column names, checked against the names there are, and those inside of other columns."""
    listed = ", ".join(map(repr, names))
    renames = column_map if prompt_column == "prompt" else column_map | {prompt_column: "prompt"}
    for old in renames:
        if old not in names and old not in inner:
            outer = f"{old.partition('.')[0]}."
            beside = ", ".join(repr(name) for name in inner if name.startswith(outer))
            raise InputError(f"{label} has no column {old!r}; it has {beside or listed}")
    after = {name: renames.get(name, name) for name in [*names, *(name for name in inner if name in renames)]}
    if "prompt" not in after.values():
        question = next((old for old, new in after.items() if new == "question"), None)
        if question is None:
            likely = next((name for name in LIKELY_PROMPTS if name in names), next(iter(names)))
            raise InputError(
                f"{label} has no column 'prompt' (nor 'question'); it has {listed}. "
                f"Name the one to use: prompt_column={likely!r} (--prompt-column {likely})"
            )
        renames[question] = after[question] = "prompt"
    twice = [name for name, times in Counter(after.values()).items() if times > 1]
    if twice:
        raise InputError(f"{label}: two columns would be called {twice[0]!r}; it has {listed}, renamed {renames}")
    return renames


def _inner_names(rows: Iterable[Mapping[str, Any]], asked: Iterable[str]) -> dict[str, None]:
    """Dotted names inside the columns that a dotted name refers to."""
    outers = {name.rpartition(".")[0] for name in asked if "." in name}
    found = [(outer, row) for row in rows for outer in outers if isinstance(_inside(row, outer), Mapping)]
    return dict.fromkeys(f"{outer}.{key}" for outer, row in found for key in _inside(row, outer))


def _inside(row: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name: `reward_model.ground_truth`. None if it does not exist.

    >>> _inside({"reward_model": {"style": "rule", "ground_truth": "72"}}, "reward_model.ground_truth")
    '72'
    """
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def is_stream(source: Any) -> bool:
    """True for rows without a length: of a generator, or a `datasets.IterableDataset`.

    >>> is_stream({"prompt": str(n)} for n in range(3)), is_stream([{"prompt": "1"}])
    (True, False)
    """
    return isinstance(source, Iterable) and not isinstance(source, str | os.PathLike) and not hasattr(source, "__len__")


def first_rows(stream: Any, num: int) -> list[Any]:
    """The first rows of a stream; no more are read. A generator that was read from before is refused."""
    if inspect.isgenerator(stream) and inspect.getgeneratorstate(stream) != inspect.GEN_CREATED:
        raise InputError("the generator of the data was read from before, and cannot start again; make a new one")
    return list(islice(stream, num))


def _open(source: Any, label: str) -> tuple[str, Iterable[Record]]:
    """A name for error texts, and the records."""
    if isinstance(source, str) and source.startswith("hf://"):
        return source, read_objects(load_hub(source), source)
    if isinstance(source, str | os.PathLike):
        path = _check_path(source)
        return str(path), read_file(path)
    if isinstance(source, list | tuple):
        if source and all(isinstance(row, str | os.PathLike) for row in source):
            raise InputError(
                f"the data is a list of {len(source)} texts, the first {str(source[0])[:80]!r}. If they name files: "
                "data is one source, join the files into one. If they are prompts: write [{'prompt': text}, ...]"
            )
        return label, read_objects(source, label)
    # `datasets` is an optional dependency: its objects are known by what they offer.
    column_names = getattr(source, "column_names", None)
    if isinstance(column_names, Mapping):
        raise InputError(f"got a data set with splits {', '.join(column_names)}; pass one: data['train']")
    if column_names is not None and hasattr(source, "__len__"):
        return label, read_objects(source, label)
    take = "; give a list of as many of its rows as you need" if is_stream(source) else ""
    raise InputError(
        f"rows must be a path, an hf:// name, a datasets.Dataset or a list of dicts, got {type(source).__name__}{take}"
    )


def _check_path(source: str | os.PathLike[str]) -> Path:
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):  # unlike path.is_file() it takes a name of any length, such as the text of a prompt
        return path
    if os.path.exists(path):
        raise InputError(f"{path} is not a file; name a .jsonl, .csv or .parquet file")
    raise InputError(f"no such file: {str(path)[:200]}")


def prompt_kind(prompt: Any) -> Literal["string", "message list"]:
    """The kind of a usable prompt."""
    return "string" if isinstance(prompt, str) else "message list"


def prompt_problem(row: Mapping[str, Any]) -> str | None:
    """The reason why the prompt of a row cannot be used, or None."""
    if "prompt" not in row:
        return f"no 'prompt' column; the row has {', '.join(map(repr, row)) or 'no columns'}"
    prompt = row["prompt"]
    if prompt is None:
        return "prompt is null"
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt is empty"
    if not isinstance(prompt, Sequence):
        return f"prompt must be a string or a list of messages, got {type(prompt).__name__}"
    if not prompt:
        return "prompt is an empty list of messages"
    for number, message in enumerate(prompt):
        problem = _message_problem(message)
        if problem:
            return f"message {number} of the prompt {problem}"
    last = prompt[-1]
    if last["role"] == "assistant":
        if len(prompt) == 1:
            return "the prompt is a turn of the assistant alone; put the user's before it"
        if more := [key for key, value in last.items() if key not in ("role", "content") and value is not None]:
            return f"the last message is the assistant's and has {more[0]!r}; only its content can be gone on with"
    if not last["content"].strip():
        return "prompt is empty: its last message has no content"
    return None


def text_problem(row: Mapping[str, Any]) -> str | None:
    """The reason why the text inside a row cannot be saved with the completions of a run, or None."""
    for column, whole in row.items():
        # A stack and not recursion: JSON may nest deeper than Python's call stack.
        stack = [column, whole]
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                problem = _character_problem(value)
                if problem:
                    return f"column {column!a} contains {problem}"
            elif isinstance(value, Mapping):
                stack.extend(value.keys())
                stack.extend(value.values())
            elif isinstance(value, list | tuple):
                stack.extend(value)
    return None


def _character_problem(text: str) -> str | None:
    if "\x00" in text:
        return "a NUL character"
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # where Python's surrogateescape puts bytes that it cannot decode
            return f"the byte {code - 0xDC00:#04x}, which is not UTF-8"
        return f"a lone surrogate, U+{code:04X}"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"must be an object with 'role' and 'content', got {type(message).__name__}"
    for name in ("role", "content"):
        if name not in message:
            return f"has no {name!r}"
    if message["role"] not in ROLES:
        return f"has role {message['role']!r:.40}; roles are {', '.join(ROLES)}"
    if not isinstance(message["content"], str):
        return f"has content of type {type(message['content']).__name__}; only text is supported"
    return None
