"""The report of `gruppo data check`, on a terminal and in a pipe."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gruppo.cli.data_check import check_data
from gruppo.task.builtin import builtin_model_path


def report(source: Any, *, terminal: bool = False, **options: Any) -> tuple[int, str]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, color_system=None)
    return check_data(source, options, console), stream.getvalue()


def test_the_plain_report_of_a_clean_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"question": "1+1", "answer": "2"}, {"question": "1+1", "answer": 3}, {"question": "10+10"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = report(path)
    assert code == 0
    assert (
        text
        == f"""\
data:
  source: {path}
  rows: 3
  usable: 3
  renamed: question is read as prompt
  duplicates: 1 rows repeat the prompt of another; 1 prompts have rows that differ in other columns
columns:
  prompt: str (3)
  answer: str (1), int (1), missing (1)
prompt length:
  shortest: 3 characters
  median: 3 characters
  90 %: 5 characters
  99 %: 5 characters
  longest: 5 characters
rows left out:
  none
prompt 1 of 3:
  1+1
prompt 2 of 3:
  1+1
prompt 3 of 3:
  10+10
"""
    )


def test_lengths_are_in_tokens_when_a_model_is_named() -> None:
    code, text = report([{"prompt": "47+85="}, {"prompt": "4+8?"}], model="builtin:carries")
    assert code == 0
    assert "longest: 7 tokens" in text
    assert "unknown: 1 prompts hold text that the tokenizer does not know" in text


def test_bad_rows_are_listed_and_the_exit_code_follows_the_policy() -> None:
    rows = [{"prompt": "1"}, {"prompt": None}, {"prompt": 3}]
    code, text = report(rows)
    assert code == 2
    assert "usable: 1\n" in text
    assert "  rows[1]: prompt is null\n  rows[2]: prompt must be a string or a list of messages, got int\n" in text
    assert report(rows, on_bad_row="drop")[0] == 0


def test_long_prompts_are_listed_but_are_no_fault() -> None:
    rows = [{"prompt": "1"}, {"prompt": "1234"}]
    code, text = report(rows, model="builtin:carries", max_prompt_tokens=3)
    assert code == 0
    assert "usable: 1\n" in text and "rows[1]: prompt has 5 tokens, limit 3" in text


def test_prompts_that_do_not_fit_the_context_are_counted() -> None:
    # The embedded model has a context of 64 tokens; with the start token 63 characters fill it.
    rows = [{"prompt": "1" * length} for length in (10, 59, 60, 62, 63)]
    code, text = report(rows, model="builtin")
    assert code == 0
    assert "usable: 4\n  too long: 1 prompts have more than 63 tokens\n" in text
    assert "  rows[4]: prompt has 64 tokens, limit 63\n" in text
    _, text = report(rows, model="builtin", max_new_tokens=4)
    assert "usable: 2\n  too long: 3 prompts have more than 60 tokens\n" in text
    code, text = report(rows, model="builtin", max_new_tokens=64)
    assert (code, text.split(";")[0]) == (
        2,
        "error: max_new_tokens=64 leaves no room for a prompt in the model's context of 64 tokens",
    )


def test_columns_and_template_are_reported_as_training_reads_them(tmp_path: Path) -> None:
    from gruppo.task.builtin import builtin_tokenizer

    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}+{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((builtin_model_path() / name).read_bytes())
    rows = [{"text": "47", "solution": "8"}]
    options: dict[str, Any] = {"model": str(tmp_path), "prompt_column": "text"}
    _, text = report(rows, **options)
    assert "  renamed: text is read as prompt\n  renamed: solution is read as answer\n" in text
    assert "  template: text prompts go in as they are; chat=true (--chat) puts them through" in text
    assert "longest: 3 tokens" in text
    _, text = report(rows, **options, chat=True, system="9")
    assert "  template: text prompts go through the chat template\n" in text
    assert "longest: 7 tokens" in text  # <bos> + 9 + 4 7 =


def test_options_of_the_template_need_a_model() -> None:
    code, text = report([{"prompt": "1"}], chat=True)
    assert (code, text) == (
        2,
        "error: chat, system, chat_template_kwargs and max_prompt_tokens need a tokenizer; give --model\n",
    )


def test_many_bad_rows_are_counted() -> None:
    _, text = report([{"prompt": "1"}] + [{"prompt": None}] * 25)
    assert text.count("prompt is null") == 10
    assert "and: 15 more" in text


@pytest.mark.parametrize(
    "source, options, message",
    [
        ("absent.jsonl", {}, "error: no such file: absent.jsonl"),
        ([{"text": "a"}], {}, "error: rows has no column 'prompt'"),
        ([{"prompt": None}], {}, "error: rows has no usable row"),
        (
            [{"prompt": "1"}],
            {"model": "./no/such/model"},
            "error: model './no/such/model' is neither a folder nor a hub id",
        ),
    ],
)
def test_unusable_data_is_an_error_with_exit_code_2(source: Any, options: dict[str, Any], message: str) -> None:
    code, text = report(source, **options)
    assert code == 2
    assert text.startswith(message)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.row("R-48", "hostile prompts")
def test_hostile_text_reaches_the_terminal_only_as_text(terminal: bool) -> None:
    hostile = "[/red][bold]\x1b[2J\x07\u202eevil"
    code, text = report([{"prompt": hostile, "[/a]\x1b": "x"}, {"prompt": 1, "b": hostile}], terminal=terminal)
    assert code == 2
    assert r"[/red][bold]\x1b[2J\x07\u202eevil" in text and r"[/a]\x1b" in text
    assert not set(text) & {"\x1b", "\x07", "\u202e"}


def test_hostile_text_in_an_error_is_escaped() -> None:
    code, text = report("\x1b[2J[/red].jsonl")
    assert (code, text) == (2, "error: no such file: \\x1b[2J[/red].jsonl\n")


def test_an_output_that_cannot_show_a_character_gets_its_escape() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=100)
    assert check_data([{"prompt": "caf\u00e9 \u20ac"}], {}, console) == 0
    assert rb"  caf\xe9 \u20ac" in raw.getvalue()


def test_a_terminal_gets_tables() -> None:
    _, text = report([{"prompt": [{"role": "user", "content": "hi"}]}], terminal=True)
    assert "┏" in text or "┌" in text
    assert "user: hi" in text


def test_long_text_is_shortened_with_a_count() -> None:
    _, text = report([{"prompt": "x" * 1000}])
    assert "x" * 600 + " ... (400 more characters)" in text
