"""Data and reward functions of verl as they are: its Parquet file, and `compute_score` called once per completion."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verl_rewards

from gruppo.errors import InputError
from gruppo.reward import RewardScorer, load_reward
from gruppo.reward.call import parameters_of
from gruppo.task import read_rows


def verl_rows(num: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i:02}+01="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"{i + 1:03}"},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(num)
    ]


@pytest.fixture
def verl_file(tmp_path: Path) -> str:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(verl_rows()), path)
    return str(path)


COLUMNS = {
    "data_source": ["openai/gsm8k"] * 4,
    "reward_model": [{"style": "rule", "ground_truth": "2"}] * 4,
    "extra_info": [{"split": "train"}] * 4,
}


def score(
    function: str | Callable[..., Any], texts: list[str], columns: dict[str, Any] = COLUMNS, **options: Any
) -> Any:
    columns = {name: values[: len(texts)] for name, values in columns.items()}
    with RewardScorer([function], workers=1, **options) as scorer:
        return scorer.score(["1+1="] * len(texts), texts, columns=columns, step=1)


def test_verls_file_is_recognised_and_its_columns_stay(verl_file: str) -> None:
    rows = read_rows(verl_file)
    assert rows.recognised() == ["reward_model.ground_truth is read as answer"]
    assert rows[3] == verl_rows()[3] | {"answer": "004"}


@pytest.mark.parametrize("spec", ["verl_rewards:compute_score", verl_rewards.compute_score])
def test_each_completion_is_one_call_with_verls_four_arguments(spec: Any) -> None:
    result = score(spec, ["2", " 2 ", "3", ""])
    assert result.values == {"compute_score": [1.0, 1.0, 0.1, 0.0]}
    assert result.failures == {}


def test_the_parts_of_a_dict_are_metrics_and_columns() -> None:
    result = score("verl_rewards:with_parts", ["2", "13", "2", "2"])
    assert result.values["with_parts"] == [1.0, -1.0, 1.0, 1.0]
    assert result.metrics["reward/with_parts/acc"] == 0.75
    assert result.metrics["reward/with_parts/length"] == (1 + 2 + 1 + 1) / 4
    assert "reward/with_parts/pred" not in result.metrics and "reward/with_parts/score" not in result.metrics
    assert result.extras == {"acc": [True, False, True, True], "length": [1, 2, 1, 1], "pred": ["2", "13", "2", "2"]}


def test_a_coroutine_is_awaited_for_all_completions_together() -> None:
    result = score("verl_rewards:judged", ["slow", "2"])
    assert result.values["judged"] == [0.0, 1.0] and result.extras["source"] == ["openai/gsm8k"] * 2


def test_a_class_with_options_runs_in_this_process() -> None:
    with RewardScorer(["verl_rewards:Scaled:factor=3"]) as scorer:
        values = scorer.score(["q"] * 2, ["2", "3"], columns={name: v[:2] for name, v in COLUMNS.items()}).values
        assert values["Scaled"] == [3.0, 0.0] and scorer.worker_pids == []


def test_a_completion_that_hangs_or_raises_costs_itself_alone() -> None:
    late = score("verl_rewards:hangs_on_hang", ["2", "hang", "2", "3"], deadline_s=0.5)
    assert late.values["hangs_on_hang"] == [1.0, 0.0, 1.0, 0.0] and list(late.failures["hangs_on_hang"]) == [1]
    bad = score("verl_rewards:raises_on_bad", ["2", "bad", "2", "3"])
    assert bad.values["raises_on_bad"] == [1.0, None, 1.0, 0.0]
    assert "ValueError: no number in it" in bad.failures["raises_on_bad"][1]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"reward_model": [{"ground_truth": "2"}], "answer": ["other"]}, 1.0),  # verl reads its own place
        ({"ground_truth": ["2"], "answer": ["other"]}, 1.0),
        ({"answer": ["2"]}, 1.0),
        ({"reward_model": [None], "answer": ["2"]}, 1.0),
        ({"reward_model": ["org/a-model"], "ground_truth": ["2"]}, 1.0),
    ],
)
def test_the_right_answer_is_where_verl_has_it_else_where_it_is_here(columns: dict[str, Any], expected: float) -> None:
    assert score("verl_rewards:raises_on_bad", ["2"], columns).values["raises_on_bad"] == [expected]


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        ("without_score", COLUMNS, "reward 'without_score' returned a dict without 'score', which has acc"),
        ("needs_more", COLUMNS, "reward 'needs_more' needs 'difficulty', which is neither a standard parameter nor"),
        ("compute_score", {"answer": ["2"]}, "reward 'compute_score' needs 'data_source', which is neither a standard"),
        ("raises_on_bad", {"target": ["2"]}, "reward 'raises_on_bad' needs 'ground_truth', which is neither a"),
    ],
)
def test_what_cannot_be_called_is_refused(function: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        score(f"verl_rewards:{function}", ["2"], columns)


def test_a_further_column_goes_to_the_parameter_of_its_name() -> None:
    columns = COLUMNS | {"difficulty": [0.5] * 4}
    assert score("verl_rewards:needs_more", ["2", "3"], columns).values["needs_more"] == [0.5, 0.0]


def test_functions_of_trls_signature_stay_as_they_are() -> None:
    assert not parameters_of(lambda completions, ground_truth: []).is_of_verl
    columns = {"solution_str": ["a worked answer"], "ground_truth": ["2"]}

    def trl(completions: list[str], solution_str: list[str], ground_truth: list[str]) -> list[float]:
        return [float(completions == ground_truth and solution_str == ["a worked answer"])]

    def takes_all(completions: list[str], **given: list[str]) -> list[float]:
        return [float(completions == given["ground_truth"] and given["solution_str"] == ["a worked answer"])]

    for function in (trl, takes_all):
        with RewardScorer([load_reward(function, isolated=False)]) as scorer:
            assert scorer.score(["1+1="], ["2"], columns=columns).totals == [1.0]
    assert parameters_of(verl_rewards.with_parts).names == {
        *("data_source", "solution_str", "ground_truth", "extra_info"),
    }


def test_reward_check_and_data_check_take_them_too(verl_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.cli.main import run

    assert run(["reward", "check", "verl_rewards:compute_score", "--data", verl_file, "--template", " {answer}"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in shown.splitlines() if "|" in line}
    assert (lines["good"], lines["bad"]) == ("1", "0.1")
    assert run(["data", "check", verl_file, "--answer-column", "extra_info.index"]) == 0
    assert "extra_info.index is read as answer" in capsys.readouterr().out
    assert run(["reward", "check", "exact_match", "--data", verl_file, "--answer-column", "nope"]) == 2
    assert "has no column 'nope'; it has 'data_source', 'prompt', 'ability'" in capsys.readouterr().out
