"""What a reward function is given: parameters by name, columns, completions in the form of the prompt."""

import subprocess
import sys

import pytest

from gruppo.errors import InputError
from gruppo.reward import Reward, RewardScorer, TrainerState, load_reward
from gruppo.reward.call import StepCompletions, parameters_of


def score(function, prompts, completions, **kwargs):
    with RewardScorer([load_reward(function, name="f", isolated=False)]) as scorer:
        return scorer.score(prompts, completions, **kwargs)


def test_only_the_parameters_a_function_names_are_passed():
    seen = {}

    def f(completions, answer, step):
        seen.update(completions=completions, answer=answer, step=step)
        return [0.5, 1.5]

    result = score(f, ["p", "p"], ["a", "b"], columns={"answer": ["x", "y"], "other": [1, 2]}, step=7)
    assert seen == {"completions": ["a", "b"], "answer": ["x", "y"], "step": 7}
    assert result.totals == [0.5, 1.5]


def test_a_function_with_kwargs_gets_everything():
    seen = {}

    def f(**kwargs):
        seen.update(kwargs)
        return [0.0]

    score(f, ["p"], ["a"], completion_ids=[(5, 6)], columns={"answer": ["x"]}, step=7, rng_seed=9)
    assert {name: value for name, value in seen.items() if not callable(value)} == {
        "prompts": ["p"],
        "completions": ["a"],
        "completion_ids": [(5, 6)],
        "answer": ["x"],
        "step": 7,
        "rng_seed": 9,
        "trainer_state": TrainerState(global_step=7, max_steps=1, epoch=7.0, num_train_epochs=1.0),
    }
    assert {name for name, value in seen.items() if callable(value)} == {"log_extra", "log_metric"}


def test_a_column_cannot_replace_a_standard_parameter():
    seen = {}

    def f(step, completions):
        seen["step"] = step
        return [0.0]

    score(f, ["p"], ["a"], columns={"step": ["column"]}, step=3)
    assert seen == {"step": 3}


def test_a_parameter_with_a_default_need_not_be_a_column():
    def f(completions, strength=0.25):
        return [strength]

    assert score(f, ["p"], ["a"]).totals == [0.25]


def test_a_missing_column_names_function_parameter_and_columns():
    def f(completions, solution):
        return [0.0]

    with pytest.raises(InputError, match=r"reward 'f' needs 'solution'.*columns are: answer, level"):
        score(f, ["p"], ["a"], columns={"answer": ["x"], "level": [1]})


def test_a_missing_column_is_found_before_anything_is_scored():
    scorer = RewardScorer(["number_match"])
    scorer.check_columns(["answer"])
    with pytest.raises(InputError, match=r"'number_match' needs 'answer'.*columns are: target"):
        scorer.check_columns(["target"])


def test_completion_ids_that_were_not_given_are_an_error_when_needed():
    with pytest.raises(InputError, match="takes 'completion_ids', which this call does not provide"):
        score("soft_overlong", ["p"], ["a"])


def test_messages_for_a_prompt_of_messages_and_text_for_text():
    chat = [{"role": "user", "content": "1+1="}]
    given = StepCompletions([chat, "1+1="], ["2", "2"])
    assert given.available["completions"] == [[{"role": "assistant", "content": "2"}], "2"]


def test_columns_of_the_wrong_length_are_refused():
    with pytest.raises(InputError, match="answer has 1 entries for 2 completions"):
        score("exact_match", ["p", "p"], ["a", "b"], columns={"answer": ["x"]})


def test_a_function_may_be_async():
    async def f(completions):
        return [float(len(text)) for text in completions]

    assert score(f, ["p", "p"], ["ab", "abc"]).totals == [2.0, 3.0]


def test_an_async_function_runs_where_a_loop_already_runs():
    import asyncio

    async def f(completions):
        return [3.0]

    async def notebook_cell():
        return score(f, ["p"], ["a"]).totals

    assert asyncio.run(notebook_cell()) == [3.0]


def test_what_a_function_logs_is_returned_per_completion_and_as_metric():
    def f(completions, log_extra, log_metric):
        log_extra("upper", [text.upper() for text in completions])
        log_metric("longest", 4)
        log_metric("lost", float("nan"))
        return [0.0, 0.0]

    result = score(f, ["p", "p"], ["ab", "abcd"])
    assert result.extras == {"upper": ["AB", "ABCD"]}
    assert result.metrics["reward/f/longest"] == 4.0
    assert "reward/f/lost" not in result.metrics


def test_a_logged_column_of_the_wrong_length_is_refused():
    def f(completions, log_extra):
        log_extra("upper", ["one"])
        return [0.0, 0.0]

    with pytest.raises(InputError, match=r"log_extra\('upper'\) got 1 values for 2 completions"):
        score(f, ["p", "p"], ["ab", "abcd"])


def test_a_positional_only_parameter_is_refused():
    def f(completions, /):
        return [0.0]

    with pytest.raises(InputError, match="'completions' by position only"):
        parameters_of(f)


@pytest.mark.parametrize(("field", "value"), [("name", "a/b"), ("name", ""), ("weight", float("nan"))])
def test_a_reward_that_cannot_be_shown_or_summed_is_refused(field, value):
    with pytest.raises(InputError):
        Reward(**{"name": "f", "function": len, field: value})


def test_importing_the_stage_imports_neither_torch_nor_numpy_nor_math_verify():
    code = "import sys, gruppo.reward; print({'torch', 'numpy', 'sympy', 'asyncio', 'pydantic'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
