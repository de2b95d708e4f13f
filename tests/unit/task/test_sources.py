"""Sources by name: the embedded task, GSM8K, reasoning-gym."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import InputError, MissingExtraError
from gruppo.task import carries, reasoning_gym
from gruppo.task.sources import GSM8K_INSTRUCTION as INSTRUCTION
from gruppo.task.sources import default_reward, gsm8k_prompt, resolve_source

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


def test_carries_sums_are_right_and_wrong_as_written_by_hand() -> None:
    pairs = [(47, 85), (3, 4), (99, 99), (50, 50), (0, 0)]
    assert [carries.add(a, b) for a, b in pairs] == ["132", "007", "198", "100", "000"]
    assert [carries.add_without_carries(a, b) for a, b in pairs] == ["022", "007", "088", "000", "000"]


def test_three_in_ten_prompts_need_no_carry() -> None:
    # 55 of 100 pairs of digits sum to 9 or less, in both places: 55 x 55 of 10,000.
    same = [carries.add(a, b) == carries.add_without_carries(a, b) for a in range(100) for b in range(100)]
    assert sum(same) == 3025


def test_the_splits_part_the_ten_thousand_prompts() -> None:
    train, held_out = carries.carries_rows("train"), carries.carries_rows("heldout")
    prompts = [row["prompt"] for row in train + held_out]
    assert (len(train), len(held_out), len(set(prompts))) == (9488, 512, 10_000)
    assert all(int(p[:2]) + int(p[3:5]) == int(row["answer"]) for row in train for p in [row["prompt"]])


def test_the_held_out_prompts_never_change() -> None:
    assert [row["prompt"] for row in carries.carries_rows("heldout")[:3]] == ["00+12=", "00+28=", "00+70="]


def test_sums_in_words_hold_out_what_carries_holds_out() -> None:
    train, held_out = resolve_source("builtin:sums"), resolve_source("builtin:sums?split=heldout")
    asked = [row["prompt"][0]["content"] for rows in (train, held_out) for row in rows]
    assert (len(train), len(held_out), len(set(asked))) == (7676, 424, 90 * 90)
    assert train[0]["prompt"][0]["role"] == "user"
    for rows, of_carries in ((train, "train"), (held_out, "heldout")):
        sums = [list(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))) for row in rows]
        assert all(a + b == int(row["answer"]) for (a, b), row in zip(sums, rows, strict=True))
        assert {f"{a}+{b}=" for a, b in sums} < {row["prompt"] for row in carries.carries_rows(of_carries)}
    # The first few are a fair sample of numbers from 10 to 99: the mean of 256 of them is within 3 standard errors.
    first = [int(number) for text in asked[7676:7804] for number in re.findall(r"\d+", text)]
    assert sum(first) / 256 == pytest.approx(54.5, abs=3 * 26 / 256**0.5)


def test_sums_in_words_are_compared_as_numbers() -> None:
    specs = ("builtin:sums", "builtin:sums?split=heldout", "builtin:carries", "gsm8k:a.jsonl", None)
    assert [default_reward(spec) for spec in specs] == ["number_match"] * 2 + [
        "exact_match",
        "number_match",
        "exact_match",
    ]


def test_the_demonstrator_carries_one_time_in_four_and_sees_no_held_out_prompt() -> None:
    stream = carries.demonstrations(seed=0)
    drawn = [next(stream) for _ in range(20_000)]
    held_out = {row["prompt"] for row in carries.carries_rows("heldout")}
    assert not any(prompt in held_out for prompt, _ in drawn)
    telling = [(p, c) for p, c in drawn if carries.add(int(p[:2]), int(p[3:5])) != _dropped(p)]
    right = sum(completion == f"{int(p[:2]) + int(p[3:5]):03d}" for p, completion in telling)
    assert all(c in (_dropped(p), f"{int(p[:2]) + int(p[3:5]):03d}") for p, c in telling)
    assert right / len(telling) == pytest.approx(0.25, abs=0.015)  # 4 standard deviations


def _dropped(prompt: str) -> str:
    return carries.add_without_carries(int(prompt[:2]), int(prompt[3:5]))


@pytest.mark.parametrize(
    "spec, count", [("", 9488), ("?split=train", 9488), ("?split=heldout", 512), ("?split=all", 10_000)]
)
def test_the_embedded_task_goes_by_name(spec: str, count: int) -> None:
    rows = resolve_source(f"builtin:carries{spec}")
    assert len(rows) == count
    assert rows.columns == ("prompt", "answer")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("builtin:sorting", "no built-in task 'sorting'; there are builtin:carries, builtin:sums, builtin:calculator"),
        ("builtin:carries?split=test", "no split 'test'; choose train, heldout or all"),
        ("builtin:carries?seed=1", "the only option is split"),
        ("builtin:carries?x", "the only option is split"),
        ("gsm8k:absent.jsonl", "no such file: absent.jsonl"),
        ("nothing.jsonl", "no such file"),
    ],
)
def test_a_name_that_means_nothing_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_source(spec)


def test_a_task_has_its_own_columns() -> None:
    with pytest.raises(InputError, match="prompt_column and column_map do not apply"):
        resolve_source("builtin:carries", column_map={"answer": "solution"})


def test_a_path_is_read_and_rows_pass_through(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "1"}\n')
    rows = resolve_source(str(path), column_map={"problem": "prompt"})
    assert list(rows) == [{"prompt": "1"}]
    assert resolve_source(rows) is rows


def test_gsm8k_asks_for_the_number_and_keeps_the_worked_answer(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2*3=6\n#### 6"}) + "\n")
    [chat] = resolve_source(f"gsm8k:{path}")
    [plain] = resolve_source(f"gsm8k:{path}?style=plain")
    assert chat == {
        "prompt": [{"role": "user", "content": f"How many?\n\n{INSTRUCTION}"}],
        "answer": "2*3=6\n#### 6",
    }
    assert plain == {"prompt": f"{INSTRUCTION}\n\nProblem: How many?\nSolution:", "answer": "2*3=6\n#### 6"}
    assert "####" in INSTRUCTION


def test_gsm8k_without_a_final_number_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    lines = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "2"}, {"question": "c"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"g\.jsonl:2: answer must be text with '#### number' \(the first of 2"):
        resolve_source(f"gsm8k:{path}")
    assert len(resolve_source(f"gsm8k:{path}", on_bad_row="drop")) == 1
    with pytest.raises(InputError, match="style must be 'chat' or 'plain'"):
        gsm8k_prompt("a", "html")  # type: ignore[arg-type]  # the refusal is what is tested


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not there")
def test_the_real_gsm8k_test_set_is_read_whole() -> None:
    rows = resolve_source(f"gsm8k:{GSM8K}")
    assert (len(rows), rows.dropped) == (1319, ())
    assert rows[0]["answer"].endswith("#### 18")
    assert rows[0]["prompt"][0]["content"].startswith("Janet’s ducks lay 16 eggs per day.")


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("so <answer> 7 </answer>", "7"),
        ("<answer>1</answer> no, <answer>2</answer>.", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("7", None),
        ("</answer><answer>", None),
        ([{"role": "assistant", "content": "<answer>x</answer>"}], "x"),
    ],
)
def test_the_final_answer_is_the_last_one_in_tags(
    completion: str, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Task:
        def score_answer(self, given: str | None, entry: dict[str, Any]) -> float:
            return float(given == answer and entry == {"question": "q", "answer": "a", "metadata": {}})

    monkeypatch.setattr(reasoning_gym, "_dataset", lambda spec: Task())
    assert reasoning_gym.score([completion], ["q"], ["a"], [{}], ["task"]) == [1.0]


def test_reasoning_gym_absent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._dataset.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'gruppo\[tasks\]'"):
        resolve_source("reasoning_gym:leg_counting")


def test_reasoning_gym_scores_its_own_answers_with_one() -> None:
    pytest.importorskip("reasoning_gym")
    rows = resolve_source("reasoning_gym:leg_counting?size=4&seed=7")
    columns = {name: [row[name] for row in rows] for name in rows.columns}
    assert len(rows) == 4 and rows[0]["prompt"].endswith("</answer>.")
    right = [f"I count. <answer>{answer}</answer>" for answer in columns["answer"]]
    assert reasoning_gym.score(right, **columns) == [1.0] * 4
    assert max(reasoning_gym.score(["<answer>-1</answer>"] * 4, **columns)) < 1.0
    assert list(resolve_source("reasoning_gym:leg_counting?size=4&seed=7")) == list(rows)
    for spec, message in (("no_such_task", "not registered"), ("leg_counting?sise=3", "unexpected keyword")):
        with pytest.raises(InputError, match=message):
            resolve_source(f"reasoning_gym:{spec}")


def test_importing_the_stage_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "pyarrow", "datasets", "rich")
    code = f"import sys, gruppo.{{}}; print([m for m in {heavy} if m in sys.modules])"
    for module, loaded in (("task", "[]"), ("cli.data_check", "['rich']")):
        words = [sys.executable, "-c", code.format(module)]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == loaded


@pytest.mark.parametrize("name", ["builtin", "carries", "dataset", "order", "prompts"])
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"gruppo.task.{name}"))
    assert result.attempted > 0 and result.failed == 0
