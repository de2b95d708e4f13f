"""Rows from memory: columns, renaming, kinds of source, and rows that hypothesis invents."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.errors import InputError, MissingExtraError
from gruppo.task.dataset import read_rows
from gruppo.task.reader import load_hub


def test_question_becomes_prompt_when_there_is_no_prompt() -> None:
    rows = read_rows([{"question": "1+1?", "answer": "2"}])
    assert list(rows) == [{"prompt": "1+1?", "answer": "2"}]
    assert rows.renamed == {"question": "prompt"}


def test_question_stays_a_column_beside_prompt() -> None:
    rows = read_rows([{"prompt": "p", "question": "q"}])
    assert list(rows) == [{"prompt": "p", "question": "q"}]
    assert rows.renamed == {}


def test_columns_are_renamed_all_at_once() -> None:
    rows = read_rows([{"prompt": "old", "problem": "new"}], column_map={"prompt": "problem", "problem": "prompt"})
    assert list(rows) == [{"problem": "old", "prompt": "new"}]


def test_prompt_column_names_the_prompt() -> None:
    assert list(read_rows([{"text": "a"}], prompt_column="text")) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    "row, answer, sentences",
    [
        # Open Instruct's and the seeds' shape, TRL's, both at once, and GSM8K's.
        ({"prompt": "1+1=", "ground_truth": "2"}, "2", ["ground_truth is read as answer"]),
        ({"prompt": "1+1=", "solution": "$2$"}, "$2$", ["solution is read as answer"]),
        (
            {"prompt": "1+1=", "solution": "It is 2.", "ground_truth": "2"},
            "2",
            ["ground_truth is read as answer, not solution"],
        ),
        (
            {"question": "1+1=", "solution": "It is 2.", "answer": "2", "ground_truth": "3"},
            "2",
            ["question is read as prompt"],
        ),
    ],
)
def test_the_answer_is_recognised_and_its_column_stays(row: dict[str, str], answer: str, sentences: list[str]) -> None:
    rows = read_rows([row])
    kept = {name: value for name, value in row.items() if name != "question"}
    assert rows[0] == {"prompt": "1+1=", **kept, "answer": answer}
    assert rows.recognised() == sentences


def test_a_named_answer_column_is_not_overruled() -> None:
    rows = read_rows([{"prompt": "1+1=", "solution": "2", "ground_truth": "3"}], column_map={"solution": "answer"})
    assert rows[0] == {"prompt": "1+1=", "answer": "2", "ground_truth": "3"}
    assert rows.recognised() == ["solution is read as answer"]


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet", "dataset"])
def test_a_dotted_name_is_a_column_inside_another(tmp_path: Path, kind: str) -> None:
    rows = [{"task": {"text": f"{i}+1=", "gold": {"value": str(i + 1)}}, "meta": {"id": i}} for i in range(3)]
    source: Any = rows
    if kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        source = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
    elif kind == "dataset":
        source = pytest.importorskip("datasets").Dataset.from_list(rows)
    names = {"task.gold.value": "answer", "meta.id": "row_id"}
    found = read_rows(source, prompt_column="task.text", column_map=names)
    assert list(found) == [row | {"prompt": f"{i}+1=", "answer": str(i + 1), "row_id": i} for i, row in enumerate(rows)]
    assert "task.gold.value is read as answer" in found.recognised()


def test_a_column_whose_own_name_has_a_dot_is_meant_first_and_gaps_are_null() -> None:
    rows = [{"prompt": "1", "a.b": "own", "a": {"b": "inner"}}, {"prompt": "2", "a.b": "own", "a": None}]
    assert [row["answer"] for row in read_rows(rows, column_map={"a.b": "answer"})] == ["own", "own"]
    rows = [{"prompt": "1", "a": {"b": "inner"}}, {"prompt": "2", "a": None}]
    assert [row["answer"] for row in read_rows(rows, column_map={"a.b": "answer"})] == ["inner", None]


def test_verls_answer_comes_after_those_of_other_names() -> None:
    held = {"style": "rule", "ground_truth": "verl's"}
    assert read_rows([{"prompt": "1", "reward_model": held}])[0]["answer"] == "verl's"
    named = read_rows([{"prompt": "1", "reward_model": held}], column_map={"reward_model.ground_truth": "answer"})
    assert named.recognised() == ["reward_model.ground_truth is read as answer"]
    found = read_rows([{"prompt": "1", "reward_model": held, "solution": "other"}])
    assert found[0]["answer"] == "other" and found.recognised() == ["solution is read as answer"]


def test_a_row_without_the_recognised_column_has_no_answer() -> None:
    rows = read_rows([{"prompt": "a", "solution": "1"}, {"prompt": "b"}])
    assert list(rows) == [{"prompt": "a", "solution": "1", "answer": "1"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    "row, options, message",
    [
        (
            {"text": "a"},
            {},
            r"no column 'prompt' \(nor 'question'\); it has 'text'.*prompt_column='text' \(--prompt-column text\)",
        ),
        ({"prompt": "a"}, {"prompt_column": "text"}, "no column 'text'; it has 'prompt'"),
        ({"prompt": "a"}, {"column_map": {"b": "c"}}, "no column 'b'"),
        (
            {"prompt": "a", "info": {"gold": 1, "id": 2}},
            {"column_map": {"info.nope": "answer"}},
            "rows has no column 'info.nope'; it has 'info.gold', 'info.id'",
        ),
        ({"prompt": "a"}, {"column_map": {"a.b": "answer"}}, "rows has no column 'a.b'; it has 'prompt'"),
        ({"prompt": "a", "text": "b"}, {"prompt_column": "text"}, "two columns would be called 'prompt'"),
        ({"prompt": "a"}, {"on_bad_row": "skip"}, "on_bad_row must be 'fail' or 'drop'"),
    ],
)
def test_columns_are_never_guessed(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rows([row], **options)


def test_the_error_counts_the_bad_rows() -> None:
    with pytest.raises(InputError, match=r"^rows\[1\]: prompt is null \(the first of 2 bad rows of 3\); fix it"):
        read_rows([{"prompt": "a"}, {"prompt": None}, {"prompt": 3}])


@pytest.mark.parametrize("source", [3, {"prompt": "a"}, None, iter([])])
def test_other_objects_are_refused(source: Any) -> None:
    with pytest.raises(InputError, match=r"rows must be a path, an hf:// name, a datasets\.Dataset or a list"):
        read_rows(source)


@pytest.mark.parametrize("names", [["a.jsonl", "b.jsonl"], [Path("a.jsonl")], ("1+1=", "2+2=")])
def test_a_list_of_texts_is_no_list_of_rows(names: Any) -> None:
    with pytest.raises(InputError, match=r"data is one source, join the files into one. If they are prompts: write \["):
        read_rows(names)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(InputError, match=r"The data set is empty\."):
        read_rows([])


def test_a_datasets_object_gives_its_rows_and_a_dict_of_splits_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    assert list(read_rows(data)) == [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    with pytest.raises(InputError, match=r"splits train; pass one: data\['train'\]"):
        read_rows(datasets.DatasetDict({"train": data}))


@pytest.mark.parametrize("spec", ["hf://", "hf://../x", "hf:///etc/x", "hf://a/b/c/d", "hf://a/b:train:x", "hf://a/.b"])
def test_a_hub_name_that_could_be_a_path_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match=r"must read hf://org/name"):
        read_rows(spec)


def test_a_hub_name_is_passed_on_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)))
    load_hub("hf://openai/gsm8k/main@abc123:test[:10%]")
    load_hub("hf://org/name")
    assert calls == [
        (("openai/gsm8k", "main"), {"split": "test[:10%]", "revision": "abc123"}),
        (("org/name", None), {"split": "train", "revision": None}),
    ]


def test_a_local_folder_does_not_pass_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="would be read instead of the hub"):
        load_hub("hf://org/name")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gruppo\[data\]'"):
        read_rows("hf://org/name")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "boss"]), "content": json_values}), max_size=3
)
any_row = st.fixed_dictionaries({"prompt": json_values | messages}, optional={"answer": json_values})


@given(st.lists(any_row | json_values, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_every_row_is_either_usable_or_listed(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    try:
        rows = read_rows(path, on_bad_row="drop")
    except InputError as error:
        assert "no usable row" in str(error) or "no column 'prompt'" in str(error)
        return
    assert len(rows) + len(rows.dropped) == len(values)
    for row in rows.rows:
        assert row.place == f"{path}:{row.index + 1}"
        assert row.values == values[row.index]  # nothing is changed on the way
        prompt = row.values["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        assert text.strip() and "\x00" not in json.dumps(row.values, ensure_ascii=False)


@given(st.sampled_from([b"", b"prompt,answer\n", b'{"prompt": "x"}\n']), st.binary(max_size=200), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.row("R-27", "random bytes")
def test_no_bytes_make_the_reader_fail_otherwise_than_by_input_error(
    tmp_path_factory: pytest.TempPathFactory, beginning: bytes, content: bytes, data: st.DataObject
) -> None:
    suffix = data.draw(st.sampled_from([".jsonl", ".csv", ".parquet"]))
    path = tmp_path_factory.mktemp("bytes") / f"data{suffix}"
    path.write_bytes(beginning + content)
    try:
        rows = read_rows(path, on_bad_row="drop")
    except InputError:
        return
    assert all(row["prompt"] for row in rows)


def test_the_remedy_for_a_missing_prompt_works_as_it_stands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Typed literally, on the command line and in Python."""
    from gruppo.cli.main import run

    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 7, "problem": "1+1=", "solution": "2"}\n')
    with pytest.raises(InputError) as caught:
        read_rows(path)
    python, flag = re.search(r"use: (.*) \((.*)\)$", str(caught.value)).groups()
    assert eval(f"read_rows(path, {python})")[0]["prompt"] == "1+1="
    assert run(["data", "check", str(path), *flag.split()]) == 0
    assert "problem is read as prompt" in capsys.readouterr().out
