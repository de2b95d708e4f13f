"""Records of a source, each with the place it came from: JSONL, CSV and Parquet files, lists, the hub.

A record that cannot be read is not an exception but a record with a reason instead of values, so that the caller can
drop it and go on. What cannot be read at all (no such file, not Parquet, no header) is an `InputError`.
"""

import csv
import inspect
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from gruppo.errors import InputError, require

Record = tuple[str, Mapping[str, Any] | str]
"""A place and the values there, or the reason why there are none. The place is `file:line` for text files (from 1),
`source[row]` for tables (from 0)."""


def open_source(source: Any, label: str) -> tuple[str, Iterable[Record]]:
    """A name for error texts, and the records of a source.

    Args:
        label: the name of a source that has none.
    """
    if isinstance(source, str) and source.startswith("hf://"):
        return source, _read_objects(load_hub(source), source)
    if isinstance(source, str | os.PathLike):
        path = _check_path(source)
        return str(path), _read_file(path)
    if isinstance(source, list | tuple):
        if source and all(isinstance(row, str | os.PathLike) for row in source):
            raise InputError(
                f"the data is a list of {len(source)} texts, the first {str(source[0])[:80]!r}. If they name files: "
                "data is one source, join the files into one. If they are prompts: write [{'prompt': text}, ...]"
            )
        return label, _read_objects(source, label)
    # `datasets` is an optional dependency: its objects are known by what they offer.
    column_names = getattr(source, "column_names", None)
    if isinstance(column_names, Mapping):
        raise InputError(f"got a data set with splits {', '.join(column_names)}; pass one: data['train']")
    if column_names is not None and hasattr(source, "__len__"):
        return label, _read_objects(source, label)
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


def _read_file(path: Path) -> Iterator[Record]:
    """Records of a file in the format that its suffix names."""
    readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        hint = "; write one JSON object per line and call it .jsonl" if path.suffix.lower() == ".json" else ""
        raise InputError(f"{path}: the suffix must be one of {', '.join(readers)}, got {path.suffix!r}{hint}")
    return reader(path)


def _read_objects(rows: Iterable[Any], label: str) -> Iterator[Record]:
    """Records of a sequence in memory: a list of dicts or a `datasets.Dataset`."""
    for index, row in enumerate(rows):
        yield f"{label}[{index}]", _columns(row)


def _columns(value: Any) -> Mapping[str, Any] | str:
    """The value, or why it has no named columns."""
    if not isinstance(value, Mapping):
        return f"expected an object with named columns, got {type(value).__name__}"
    bad = [name for name in value if not isinstance(name, str)]
    return f"column names must be strings, got {bad[0]!r}" if bad else value


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        _refuse_utf16(file, path)
        # Lines are bytes: one that is not UTF-8 costs a row, not the file.
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if line := line.strip(b" \t\r\n"):
                yield f"{path}:{number}", _parse_line(line)


def _parse_line(line: bytes) -> Mapping[str, Any] | str:
    hooks: Any = {"object_pairs_hook": _unique_keys, "parse_constant": _refuse_constant, "parse_float": _finite_float}
    try:
        return _columns(json.loads(line.decode("utf-8"), **hooks))
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {line[error.start]:#04x} at {error.start}"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return "not usable JSON: nested too deeply"
    except ValueError as error:  # our own hooks, and Python's limit on the digits of an integer
        return f"not usable JSON: {error}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError(f"key {_twice(name for name, _ in pairs)!r} appears twice in one object")
    return result


def _twice(names: Iterable[str]) -> str:
    """The first of several names that comes again; the time is linear in their number."""
    return next(name for name, count in Counter(names).items() if count > 1)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; write null")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is too large")
    return value


def _refuse_utf16(file: BinaryIO, path: Path) -> None:
    if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{path} is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    file.seek(0)


def _read_csv(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        _refuse_utf16(file, path)
    # surrogateescape turns bytes that are not UTF-8 into lone surrogates, which the row check then reports with their
    # line; strict decoding would end the file. The csv module keeps every value a string: "007" stays so.
    limit = csv.field_size_limit(2**31 - 1)  # 128 KiB would be less than a long prompt
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, delimiter=_delimiter(file), strict=True)
            header = next(reader, None)
            if header is None:
                raise InputError(f"{path} is empty; the first line must name the columns")
            if len(set(header)) < len(header):
                raise InputError(f"{path}:1: column {_twice(header)!r} appears twice")
            line = reader.line_num + 1  # a quoted value may span lines: a record is named by its first
            for fields in reader:
                place, line = f"{path}:{line}", reader.line_num + 1
                if fields and len(fields) != len(header):
                    yield place, f"{len(fields)} values for {len(header)} columns"
                elif fields:
                    yield place, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise InputError(f"{path}: not CSV: {error}; write it again") from error
    finally:
        csv.field_size_limit(limit)


def _delimiter(file: TextIO) -> str:
    """The comma, or what separates the columns of a header without one: a semicolon or a tab."""
    header = file.readline()
    file.seek(0)
    return next((mark for mark in ",;\t" if mark in header), ",")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise InputError(f"{path}: two columns have the same name: {_twice(names)!r}; rename one")
            for batch in file.iter_batches(batch_size=1024):
                for row in _batch_rows(batch):
                    yield f"{path}[{index}]", row
                    index += 1
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}; write it again, or as .jsonl") from error


def _batch_rows(batch: Any) -> list[dict[str, Any] | str]:
    """Rows of an Arrow batch, with a reason instead of one whose text is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return ["not UTF-8"]
        return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]


_PART = r"[A-Za-z0-9][\w.-]*"  # must not begin with a dot: `datasets` would take ../x for a local folder
_SPEC = re.compile(
    rf"hf://(?P<id>{_PART}(?:/{_PART})?)(?:/(?P<config>{_PART}))?"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?::(?P<split>\w+(?:\[[\w%:-]*\])?))?"
)


def load_hub(spec: str) -> Any:
    """The `datasets.Dataset` named by `hf://org/name[/config][@revision][:split]`; the split is `train` by default.

    Nothing is executed from the hub: `datasets` reads data files only, and a revision can be pinned.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InputError(f"{spec!r} must read hf://org/name[/config][@revision][:split]")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise require("data", "datasets", f"reading {spec}") from error
    name = match["id"]
    if Path(name).exists():
        # `datasets` prefers a folder of that name to the hub, which hf:// does not mean.
        raise InputError(f"{spec}: the local path {name!r} would be read instead of the hub; pass its files by path")
    try:
        return load_dataset(name, match["config"], split=match["split"] or "train", revision=match["revision"])
    except (OSError, ValueError) as error:  # not found, no network, no such split or config
        raise InputError(f"{spec} cannot be loaded: {error}") from error
