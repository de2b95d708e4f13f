"""Rows of a data set, checked: from a file, a list, a `datasets.Dataset` or the hub.

    >>> rows = read_rows([{"prompt": "1+1=", "answer": "2"}, {"prompt": None}], on_bad_row="drop")
    >>> rows[0]
    {'prompt': '1+1=', 'answer': '2'}
    >>> rows.dropped
    (DroppedRow(row='rows[1]', reason='prompt is null'),)

A row has a `prompt`: a string, or a list of messages with `role` and `content`. All other columns are free, but their
text must be storable.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gruppo.errors import InputError
from gruppo.task.reader import open_source
from gruppo.task.row_check import prompt_kind, prompt_problem, text_problem

BadRowPolicy = Literal["fail", "drop"]
"""`fail`: the first bad row ends the reading with an error. `drop`: bad rows are left out and listed."""

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
    convert: Callable[[dict[str, Any]], dict[str, Any] | str] | None = None,
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
        convert: makes the values of a usable row, or says why it cannot.
    """
    if on_bad_row not in ("fail", "drop"):
        raise InputError(f"on_bad_row must be 'fail' or 'drop', got {on_bad_row!r}")
    label, opened = open_source(source, label)
    records = list(opened)
    found = [read for _, read in records if not isinstance(read, str)]
    columns = _Columns.of(found, prompt_column, dict(column_map or {}), label)
    rows: list[Row] = []
    dropped: list[DroppedRow] = []
    kinds: set[str] = set()
    for index, (place, read) in enumerate(records):
        values = read if isinstance(read, str) else _checked(columns.values(read), kinds)
        if convert is not None and not isinstance(values, str):
            values = convert(values)
        if isinstance(values, str):
            dropped.append(DroppedRow(place, values))
        else:
            rows.append(Row(values=values, index=index, place=place))
    _check_dropped(label, dropped, len(records), on_bad_row)
    copied = None if columns.answer_from == "answer" else columns.answer_from
    return Rows(rows=tuple(rows), dropped=tuple(dropped), source=label, renamed=columns.renamed, answer_from=copied)


def _checked(values: dict[str, Any], kinds: set[str]) -> dict[str, Any] | str:
    """The values of a usable row, or why it is none. `kinds` has the kind of the prompts before."""
    problem = prompt_problem(values) or text_problem(values)
    if problem is not None:
        return problem
    kind = prompt_kind(values["prompt"])
    for other in kinds - {kind}:
        # Half of the prompts with a chat template and half without would be a silent mistake.
        return f"prompt is a {kind}, those of the rows before are {other}s"
    kinds.add(kind)
    return values


def _check_dropped(label: str, dropped: list[DroppedRow], total: int, on_bad_row: BadRowPolicy) -> None:
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


@dataclass(frozen=True, slots=True)
class _Columns:
    """How the columns of a source are called."""

    renamed: dict[str, str]
    """Old to new names."""
    inner: Mapping[str, None]
    """Dotted names of what is inside of other columns."""
    answer_from: str

    @classmethod
    def of(
        cls, found: Sequence[Mapping[str, Any]], prompt_column: str, column_map: dict[str, str], label: str
    ) -> "_Columns":
        names = dict.fromkeys(name for read in found for name in read)
        asked = [name for name in (prompt_column, *column_map, *ANSWERS) if name not in names]
        inner = _inner_names(found, asked)
        renamed = _renames(names, inner, prompt_column, column_map, label) if names else {}
        after = {renamed.get(name, name) for name in names} | inner.keys()
        return cls(renamed, inner, next((name for name in ANSWERS if name in after), "answer"))

    def values(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a record under the names that rows have."""
        values = {self.renamed.get(name, name): value for name, value in read.items()}
        values |= {new: _inside(read, old) for old, new in self.renamed.items() if old in self.inner}
        if self.answer_from in self.inner:
            values["answer"] = _inside(read, self.answer_from)
        elif self.answer_from in values:
            values["answer"] = values[self.answer_from]
        return values


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
