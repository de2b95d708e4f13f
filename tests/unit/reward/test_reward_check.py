"""`gruppo reward check`: what it prints and when it says no."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from gruppo.cli.reward_check import RewardCheckArguments, check_reward

ROWS = [{"prompt": "6*7=", "answer": "42"}, {"prompt": "2*9=", "answer": "18"}]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def check(spec, data=ROWS, **options):
    out = io.StringIO()
    code = check_reward(
        RewardCheckArguments.model_construct(reward=spec, data=data, **options), Console(file=out, width=100)
    )
    return code, out.getvalue()


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "from gruppo.reward import ExactMatch\n"
        "inside, of_target = ExactMatch(inside='answer'), ExactMatch(column='target')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def cells(text):
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:5]] for line in lines[1:]}


@pytest.mark.parametrize("rows", [ROWS, CHATS])
def test_a_sound_reward_is_shown_per_kind_of_completion(rows):
    code, text = check("exact_match", rows)
    assert code == 0
    assert cells(text) == {
        "good": ["1", "0", "0/2", "0/2"],
        "bad": ["0", "0", "0/2", "0/2"],
        "empty": ["0", "0", "0/2", "0/2"],
        "huge": ["0", "0", "0/2", "0/2"],
        "junk": ["0", "0", "0/2", "0/2"],
    }
    assert "std over kinds: 0.4" in text
    assert "warning" not in text


def test_a_reward_that_cannot_tell_good_from_bad_is_warned_about():
    code, text = check("tag_format")
    assert code == 0
    assert "it gives 0 to every kind of completion" in text
    assert "it cannot tell good from bad: both get 0" in text


@pytest.mark.usefixtures("own_rewards")
def test_a_template_makes_the_good_completion_good():
    template = "<think>x</think><answer>{answer}</answer>"
    code, text = check("own_rewards:inside", template=template)
    assert code == 0
    assert cells(text)["good"][0] == "1"
    assert cells(text)["bad"][0] == "0"


def test_a_reward_that_raises_everywhere_is_unusable_and_shows_its_traceback():
    code, text = check("hostile_rewards:raises_always")
    assert code == 2
    assert cells(text)["good"] == ["-", "-", "2/2", "2/2"]
    assert "RuntimeError: the judge is down" in text
    assert "unusable: it fails on every good completion" in text


def test_a_reward_that_returns_the_wrong_shape_is_unusable():
    code, text = check("hostile_rewards:one_value", [ROWS[0]] * 2)
    assert code == 2
    assert "returned 1 values for 2 completions" in text


@pytest.mark.parametrize(
    ("spec", "text"),
    [("exact_mach", "did you mean 'exact_match'"), ("hostile_rewards:nothing", "has no 'nothing'")],
)
def test_a_wrong_name_is_unusable(spec, text):
    code, shown = check(spec)
    assert code == 2
    assert text in shown


@pytest.mark.usefixtures("own_rewards")
def test_the_gold_answer_may_be_in_another_column():
    rows = [{"prompt": "6*7=", "target": "42"}]
    code, text = check("own_rewards:of_target", rows, answer_column="target")
    assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")
    assert "the rows have no gold answer" in check("length_penalty", rows)[1]
    for spec in ("own_rewards:of_target", "exact_match:column=target"):  # the reward names the column itself
        code, text = check(spec, rows)
        assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")
    unknown = check("tag_format", rows)[1]
    assert "to every kind" not in unknown and "--answer-column names the column" in unknown


@pytest.mark.usefixtures("own_rewards")
def test_a_missing_column_and_missing_rows_are_unusable():
    assert "needs 'target'" in check("own_rewards:of_target")[1]
    assert check("exact_match", []) == (2, "unusable: The data set is empty.\n")


def test_rows_are_read_from_a_file(tmp_path):
    pytest.importorskip("gruppo.task.dataset")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": f"#### {n + 1}"}) + "\n" for n in range(3)))
    code, text = check("number_match", str(path))
    assert code == 0
    assert "number_match on 3 rows" in text
    assert cells(text)["good"][0] == "1"


@pytest.mark.row("R-48", "hostile tracebacks of reward check")
def test_control_characters_and_markup_of_a_traceback_do_not_reach_the_terminal(tmp_path, monkeypatch):
    (tmp_path / "loud_rewards.py").write_text(
        "def f(completions, **kwargs):\n    raise ValueError('\\x1b[2J [/red] \\u202e')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, text = check("loud_rewards:f")
    assert code == 2
    assert "\x1b" not in text and "\u202e" not in text
    assert "[/red]" in text


CORRECTNESS = """
def correctness(prompts, completions, answer, **kwargs):
    for prompt, text, gold in zip(prompts, completions, answer):
        print(f"Question: {prompt}\\nAnswer: {gold}\\nResponse: {text}")
    return [float(text == gold) for text, gold in zip(completions, answer)]

def here(completions, answer, **kwargs):
    return correctness(completions, completions, answer)
here.isolated = False
"""


@pytest.mark.parametrize("name", ["correctness", "here"])
def test_what_a_reward_prints_is_shown_in_part_and_without_control_characters(tmp_path, name):
    (tmp_path / "talkative.py").write_text(CORRECTNESS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [sys.executable, "-m", "gruppo", "reward", "check", f"talkative:{name}", "--data", "rows.jsonl"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8:surrogateescape"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == b""  # without the filter 200 kB, with sequences that clear the screen
    text = ran.stdout.decode()
    assert "it printed:" in text and "Response: " in text and " more bytes)" in text
    assert len(text) < 5000 and "\x1b" not in text and "\u202e" not in text


def test_every_source_of_train_is_a_source_here(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"{n} and 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = check("number_match", f"gsm8k:{path}")
    assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")
    code, text = check("exact_match", "builtin:carries?split=heldout")
    assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")
    assert "unusable: no such file: absent.jsonl" in check("exact_match", "gsm8k:absent.jsonl")[1]


def test_columns_are_named_as_in_train(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("problem,solution\n6*7=,42\n2*9=,18\n")
    code, text = check("number_match", str(path), prompt_column="problem", answer_column="solution")
    assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")
    code, text = check("number_match:column=solution", str(path), prompt_column="problem", answer_column="solution")
    assert (code, cells(text)["good"][0], cells(text)["bad"][0]) == (0, "1", "0")


def test_a_template_has_lines(tmp_path, monkeypatch):
    (tmp_path / "lined.py").write_text(
        "def f(completions, answer, **_):\n"
        "    return [float(text == f'So:\\n{gold}') for text, gold in zip(completions, answer)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cells(check("lined:f", template=r"So:\n{answer}")[1])["good"][0] == "1"
