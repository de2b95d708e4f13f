"""Malformed files: each fault costs one row, named by file and line, or the whole file with one clear error."""

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gruppo.errors import InputError
from gruppo.task.dataset import read_rows

GOOD = b'{"prompt": "1+1=", "answer": "2"}'

BAD_LINES = {
    "truncated": (b'{"prompt": "1+1="', "not JSON: Expecting ',' delimiter at character 17"),
    "single quotes": (b"{'prompt': '1'}", "not JSON: Expecting property name"),
    "list": (b"[1, 2]", "expected an object with named columns, got list"),
    "string": (b'"1+1="', "expected an object with named columns, got str"),
    "null row": (b"null", "expected an object with named columns, got NoneType"),
    "two objects": (GOOD + GOOD, "not JSON: Extra data"),
    "latin-1": (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 0xe9 at 15"),
    "NaN": (b'{"prompt": "x", "score": NaN}', "NaN is not a JSON value; write null"),
    "huge float": (b'{"prompt": "x", "score": 1e999}', "number 1e999 is too large"),
    "huge integer": (b'{"prompt": "x", "score": ' + b"9" * 5000 + b"}", "not usable JSON"),
    "deep nesting": (b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "key twice": (b'{"prompt": "x", "prompt": "y"}', "key 'prompt' appears twice"),
    "no prompt": (b'{"answer": "2"}', "no 'prompt' column; the row has 'answer'"),
    "null prompt": (b'{"prompt": null}', "prompt is null"),
    "number prompt": (b'{"prompt": 7}', "prompt must be a string or a list of messages, got int"),
    "object prompt": (b'{"prompt": {"a": 1}}', "prompt must be a string or a list of messages, got dict"),
    "empty prompt": (b'{"prompt": ""}', "prompt is empty"),
    "blank prompt": (b'{"prompt": " \\n"}', "prompt is empty"),
    "no messages": (b'{"prompt": []}', "prompt is an empty list of messages"),
    "list of strings": (b'{"prompt": ["a"]}', "message 0 of the prompt must be an object"),
    "wrong role": (b'{"prompt": [{"role": "boss", "content": "x"}]}', "message 0 of the prompt has role 'boss'"),
    "no role": (b'{"prompt": [{"content": "x"}]}', "message 0 of the prompt has no 'role'"),
    "no content": (b'{"prompt": [{"role": "user"}]}', "message 0 of the prompt has no 'content'"),
    "null content": (b'{"prompt": [{"role": "user", "content": null}]}', "content of type NoneType"),
    "empty content": (b'{"prompt": [{"role": "user", "content": ""}]}', "its last message has no content"),
    "assistant last": (
        b'{"prompt": [{"role": "assistant", "content": "x"}]}',
        "the prompt is a turn of the assistant alone",
    ),
    "mixed kinds": (b'{"prompt": [{"role": "user", "content": "x"}]}', "those of the rows before are strings"),
    "NUL": (b'{"prompt": "a\\u0000b"}', "column 'prompt' contains a NUL character"),
    "surrogate": (b'{"prompt": "x", "answer": "\\ud83d"}', "column 'answer' contains a lone surrogate, U+D83D"),
    "deep surrogate": (b'{"prompt": "x", "info": {"a": ["\\udfff"]}}', "column 'info' contains a lone surrogate"),
}


@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.row("R-27", "bad lines")
def test_a_bad_line_is_named_with_its_line_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(InputError) as error:
        read_rows(path)
    text = str(error.value)
    assert text.startswith(f"{path}:2: ") and reason in text and "on_bad_row='drop'" in text


@pytest.mark.parametrize("line, reason", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_can_be_dropped_and_is_listed(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    rows = read_rows(path, on_bad_row="drop")
    assert list(rows) == [{"prompt": "1+1=", "answer": "2"}] * 2
    assert [row.index for row in rows.rows] == [0, 2]
    [(place, why)] = rows.dropped
    assert place == f"{path}:2" and reason in why


@pytest.mark.row("R-27", "BOM, CRLF, blank lines")
def test_byte_order_mark_crlf_and_blank_lines_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n  \n" + GOOD)
    rows = read_rows(path)
    assert list(rows) == [{"prompt": "1+1=", "answer": "2"}] * 2
    assert [row.place for row in rows.rows] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"data\.jsonl has no rows"):
        read_rows(path, on_bad_row="drop")


@pytest.mark.row("R-27", "no usable row")
def test_no_usable_row_is_refused_even_when_dropping(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": null}\n{"prompt": ""}\n')
    with pytest.raises(InputError, match=r"has no usable row; .*data\.jsonl:1: prompt is null"):
        read_rows(path, on_bad_row="drop")


def test_utf_16_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"prompt": "x"}'.encode("utf-16"))
    with pytest.raises(InputError, match="is UTF-16; convert it to UTF-8"):
        read_rows(path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent.jsonl", "no such file"),
        ("../absent.jsonl", "no such file"),
        ("a\0b.jsonl", "no such file"),
        ("x" * 300 + ".jsonl", "no such file: xxx"),
        ("~nobody-of-that-name/x.jsonl", "no such file: ~nobody"),
        (".", "is not a file"),
    ],
)
def test_an_unusable_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        read_rows(name)


def test_an_unknown_suffix_is_refused_and_json_gets_a_hint(tmp_path: Path) -> None:
    for name, message in (("a.txt", r"must be one of \.jsonl"), ("a.json", r"call it \.jsonl")):
        (tmp_path / name).write_text("[]")
        with pytest.raises(InputError, match=message):
            read_rows(tmp_path / name)


def test_csv_values_stay_strings_and_records_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"two\r\nlines",007\r\n\r\nx\r\ny,1\r\n')
    rows = read_rows(path, on_bad_row="drop")
    assert list(rows) == [{"prompt": "two\r\nlines", "answer": "007"}, {"prompt": "y", "answer": "1"}]
    assert [row.place for row in rows.rows] == [f"{path}:2", f"{path}:6"]
    assert rows.dropped == ((f"{path}:5", "1 values for 2 columns"),)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_csv_with_another_delimiter_is_recognised_by_its_header(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "data.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows([["prompt", "answer"], ["1,5 + 1=", "2,5"], [f"a{mark}b", "c"]])
    assert list(read_rows(path)) == [
        {"prompt": "1,5 + 1=", "answer": "2,5"},
        {"prompt": f"a{mark}b", "answer": "c"},
    ]


def test_csv_with_commas_in_its_header_keeps_other_marks_as_text(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt,answer;unit\n1;2,3\n")
    assert list(read_rows(path)) == [{"prompt": "1;2", "answer;unit": "3"}]


def test_a_long_csv_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt\n" + "x" * 2**20)  # the csv module's own limit is 2**17
    assert len(read_rows(path)[0]["prompt"]) == 2**20


def test_csv_bytes_that_are_not_utf8_cost_one_row(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b"prompt\ncaf\xe9\ntea\n")
    rows = read_rows(path, on_bad_row="drop")
    assert list(rows) == [{"prompt": "tea"}]
    assert rows.dropped == ((f"{path}:2", "column 'prompt' contains the byte 0xe9, which is not UTF-8"),)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"prompt,prompt\n1,2\n", "column 'prompt' appears twice"),
        (b'prompt\n"open\n', "not CSV: unexpected end of data"),
        (b"prompt\n", "has no rows"),
    ],
)
def test_a_broken_csv_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(path)


def test_parquet_rows_keep_messages_and_types(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    turns = [[{"role": "user", "content": "hi"}], None]
    pq.write_table(pa.table({"prompt": turns, "answer": [7, 8]}), path)
    rows = read_rows(path, on_bad_row="drop")
    assert list(rows) == [{"prompt": [{"role": "user", "content": "hi"}], "answer": 7}]
    assert rows.dropped == ((f"{path}[1]", "prompt is null"),)


def test_parquet_text_that_is_not_utf8_costs_one_row(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    raw = pa.array([b"good", b"caf\xe9"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), path)
    rows = read_rows(path, on_bad_row="drop")
    assert list(rows) == [{"prompt": "good"}]
    assert rows.dropped == ((f"{path}[1]", "not UTF-8"),)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all, but long enough to be one"])
def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_rows(path)
