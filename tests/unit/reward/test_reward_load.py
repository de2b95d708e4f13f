"""Names become rewards, and a wrong name says what was meant."""

import importlib.util
import sys
from functools import partial

import hostile_rewards
import pytest

from gruppo.cli.listing import formula
from gruppo.errors import InputError, MissingExtraError
from gruppo.process.by_name import read_spec, write_spec
from gruppo.reward import (
    ExactMatch,
    MathMatch,
    NumberMatch,
    PatternMatch,
    Reward,
    RewardScorer,
    SoftOverlong,
    TagFormat,
    exact_match,
    load_reward,
)
from gruppo.reward.load import BUILTIN, sendable
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import build_advantage, build_loss


def test_every_builtin_loads_by_name_with_its_defaults():
    assert {name: load_reward(name).name for name in BUILTIN} == {name: name for name in BUILTIN}


def test_builtins_run_here_except_those_whose_time_is_unbounded():
    assert {name for name in BUILTIN if load_reward(name).isolated} == {"math_match", "pattern_match"}


def test_a_builtin_takes_parameters():
    reward = load_reward("soft_overlong", max_length=100, cache=10, weight=0.5, name="overlong")
    assert reward == Reward(
        name="overlong", function=SoftOverlong(max_length=100, cache=10), weight=0.5, isolated=False
    )


def test_the_users_function_runs_in_a_worker_unless_told_otherwise():
    reward = load_reward("hostile_rewards:length")
    assert (reward.name, reward.weight, reward.isolated) == ("length", 1.0, True)
    assert load_reward("hostile_rewards:length", isolated=False).isolated is False


def test_a_class_is_made_with_its_parameters():
    reward = load_reward("hostile_rewards:Scaled", factor=3)
    assert reward.function(completions=["ab"]) == [6]
    assert load_reward(exact_match).name == "exact_match"


@pytest.mark.parametrize(
    ("spec", "function"),
    [
        ("number_match:column=solution", NumberMatch(column="solution")),
        ("number_match:column=solution,inside=answer", NumberMatch(column="solution", inside="answer")),
        ("number_match:column=solution, inside=answer", NumberMatch(column="solution", inside="answer")),
        ("soft_overlong:max_length=100,cache=10", SoftOverlong(max_length=100, cache=10)),
        ("tag_format:tags=plan,answer,prefix=<plan>", TagFormat(tags=("plan", "answer"), prefix="<plan>")),
        (r"pattern_match:pattern=^\d{1,3}: a=b$,max_chars=9", PatternMatch(pattern=r"^\d{1,3}: a=b$", max_chars=9)),
        ("pattern_match:pattern=a,b", PatternMatch(pattern="a,b")),
    ],
)
def test_options_after_a_name_are_the_parameters_of_the_constructor(spec, function):
    reward = load_reward(spec, weight=0.5)
    assert (reward.function, reward.weight) == (function, 0.5)
    assert reward.isolated is type(function).isolated


def test_a_class_of_ones_own_takes_options_in_the_types_it_declares():
    reward = load_reward("hostile_rewards:Within:low=2,high=3,words=a,b,inverted=yes")
    assert reward.function.given == (2, 3.0, ("a", "b"), True)
    assert [type(value) for value in reward.function.given] == [int, float, tuple, bool]
    with RewardScorer([reward, "hostile_rewards:Within:low=4"], workers=1) as scorer:
        result = scorer.score(["p"] * 3, ["a", "ab", "abcd"])
    assert result.values == {"Within": [1.0, 0.0, 1.0], "Within_2": [0.0, 0.0, 1.0]}


def test_one_builtin_with_two_options_is_two_rewards():
    with RewardScorer(["number_match:column=a", "number_match", "number_match:column=b"]) as scorer:
        result = scorer.score(["p"], ["3"], columns={"a": ["3"], "b": ["4"], "answer": [None]})
    assert result.values == {"number_match_2": [1.0], "number_match": [None], "number_match_3": [0.0]}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "number_match:colum=a",
            "^reward 'number_match' has no option 'colum' .did you mean 'column'.*; it has column, inside$",
        ),
        ("length_penalty:weight=1", "^reward 'length_penalty' has no option 'weight'; it has target, scale$"),
        ("soft_overlong:cache=many", "^option cache='many' of reward 'soft_overlong' cannot be used: .*valid integer"),
        ("soft_overlong:cache=0", "cache must be in 1..max_length=20480, got 0"),
        ("exact_match:column=a,column=b", "gives the option 'column' twice"),
        ("number_match:solution", "no module 'number_match'.*options of the built-in are written number_match:key="),
        ("hostile_rewards:length:factor=3", "'hostile_rewards:length:factor=3' is a function and takes no parameters"),
        ("hostile_rewards:Within:high=3", "cannot be made with parameters.*'low'"),
        ("hostile_rewards:Within:lo=3", "has no option 'lo' .did you mean 'low'.*; it has low, high, words, inverted$"),
    ],
)
def test_an_option_that_does_not_exist_or_has_another_type_is_refused(spec, text):
    with pytest.raises(InputError, match=text):
        load_reward(spec)


def test_yaml_may_give_options_as_a_mapping():
    rewards = [{"number_match": {"column": "solution"}}, "think_format", {"tag_format": {"tags": ["a", "b"]}}]
    config = TrainConfig.read({"rewards": rewards, "reward_weights": [1, 0.5, 0.25]})
    assert config.rewards == ("number_match:column=solution", "think_format", "tag_format:tags=a,b")
    assert load_reward(config.rewards[2]).function == TagFormat(tags=("a", "b"))
    assert TrainConfig.read(config.model_dump()) == config
    with pytest.raises(InputError, match=r"rewards=.*one name with a mapping: \{number_match: \{column: solution\}\}"):
        TrainConfig.read({"rewards": [{"number_match": "solution"}]})
    with pytest.raises(InputError, match=r"cannot be written as name:key=value.*holds ',word='"):
        TrainConfig.read({"rewards": [{"pattern_match": {"pattern": "x,y=3"}}]})


def test_a_spec_is_read_back_as_it_was_written():
    for name, options in [("a", {}), ("m:C", {"x": "1"}), ("org/name", {"x": "a:b=c", "y": ""}), ("a", {"x": "1,2"})]:
        assert read_spec(write_spec(name, options)) == (name, options)


def test_a_reward_passes_through_with_changes():
    reward = load_reward("exact_match")
    assert load_reward(reward) == reward
    assert load_reward(reward, weight=2.0) == Reward(
        name="exact_match", function=ExactMatch(), weight=2.0, isolated=False
    )


def names(*rewards):
    return [reward.name for reward in RewardScorer(rewards).rewards]


def at_least(completions, length):
    return [float(len(text) >= length) for text in completions]


def test_a_partial_is_named_after_the_function_it_wraps():
    assert load_reward(partial(at_least, length=3)).name == "at_least"
    assert load_reward(partial(partial(at_least), length=3)).name == "at_least"
    assert load_reward(partial(ExactMatch(column="target"))).name == "exact_match"


def test_callables_of_the_same_name_are_numbered_and_keep_their_values():
    rewards = [load_reward(partial(at_least, length=n), weight=n, isolated=False) for n in (1, 2, 4)]
    with RewardScorer([*rewards, NumberMatch(), NumberMatch(column="other")]) as scorer:
        result = scorer.score(["p"] * 2, ["12", "1234"], columns={"answer": ["12", "12"], "other": ["0", "1234"]})
    assert result.values == {
        "at_least": [1.0, 1.0],
        "at_least_2": [1.0, 1.0],
        "at_least_3": [0.0, 1.0],
        "number_match": [1.0, 0.0],
        "number_match_2": [0.0, 1.0],
    }
    assert result.totals == [1.0 + 2.0 + 1.0, 1.0 + 2.0 + 4.0 + 1.0]


def test_a_number_avoids_every_name_that_was_given():
    assert names(ExactMatch(column="a"), "exact_match") == ["exact_match_2", "exact_match"]
    taken = load_reward(at_least, name="length_2")
    assert names(hostile_rewards.length, partial(hostile_rewards.length), taken) == ["length", "length_3", "length_2"]


def test_functions_of_the_same_name_from_two_modules_are_numbered(tmp_path, monkeypatch):
    (tmp_path / "other_rewards.py").write_text("def length(completions):\n    return [7.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert names("hostile_rewards:length", "other_rewards:length") == ["length", "length_2"]


@pytest.mark.parametrize(
    "rewards",
    [
        ["number_match", "number_match"],
        [load_reward("number_match", column="a"), load_reward("number_match", column="b")],
        ["hostile_rewards:length", "hostile_rewards:length"],
        [load_reward("hostile_rewards:Scaled", factor=2), load_reward("hostile_rewards:Scaled", factor=3)],
        [at_least, at_least],
        [Reward(name="f", function=at_least), Reward(name="f", function=hostile_rewards.length)],
        [load_reward(at_least, name="f"), load_reward(load_reward(hostile_rewards.length), name="f")],
    ],
)
def test_the_same_reward_twice_and_a_name_given_twice_are_refused(rewards):
    with pytest.raises(InputError, match=r"must have different names, got '\w+' 2 times; .*load_reward\(\.\.\., name="):
        RewardScorer(rewards)


def test_a_scorer_without_rewards_is_refused():
    with pytest.raises(InputError, match=r"rewards needs at least one function, such as 'exact_match', got \[\]"):
        RewardScorer([])


def test_a_module_is_found_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def f(completions):\n    return [7.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_reward("rewards_of_mine:f").function(completions=["a"]) == [7.0]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("exact_mach", "no built-in reward is called 'exact_mach'.*did you mean 'exact_match'"),
        ("hostile_rewards:lenght", "has no 'lenght'.*did you mean 'length'"),
        ("hostile_rewards:not_callable", "is int 3, not a function"),
        ("hostile_rewards:", "is not of the form module:name"),
        (":f", "is not of the form module:name"),
        ("hostile_rewards.py:length", "names a file; name the module: 'hostile_rewards:length'"),
        ("./dir/hostile_rewards.py:length", "name the module: 'dir.hostile_rewards:length'"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
    ],
)
def test_a_wrong_name_says_what_was_meant(spec, text):
    with pytest.raises(InputError, match=text):
        load_reward(spec)


def test_a_misspelt_module_of_the_current_directory_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no module 'my_reward'.*did you mean 'my_rewards'"):
        load_reward("my_reward:f")


@pytest.mark.parametrize(
    ("what", "load"),
    [
        ("reward", load_reward),
        ("loss", lambda spec: build_loss(TrainConfig(loss=spec))),
        ("loss", formula),
        ("correction", lambda spec: build_loss(TrainConfig(correction=spec))),
        ("advantage", lambda spec: build_advantage(TrainConfig(advantage=spec))),
    ],
)
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("no_such_module_here:f", "^no module 'no_such_module_here' for {what} 'no_such_module_here:f'"),
        ("hostile_rewards:lenght", "has no 'lenght' for {what} 'hostile_rewards:lenght' .did you mean 'length'"),
        ("hostile_rewards:", "^{what} 'hostile_rewards:' is not of the form module:name"),
        ("rewards.py:f", "^{what} 'rewards.py:f' names a file; name the module: 'rewards:f'"),
        ("broken_things:f", "^importing 'broken_things' for {what} 'broken_things:f' failed:(?s:.*)no licence"),
        (
            "needy_things:f",
            "^'needy_things' of {what} 'needy_things:f' needs a module that is absent: No module named 'no_such",
        ),
    ],
)
def test_what_cannot_be_imported_is_called_what_it_is(what, load, spec, text, tmp_path, monkeypatch):
    (tmp_path / "broken_things.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "needy_things.py").write_text("import no_such_module_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=text.format(what=what)):
        load(spec)


def test_parameters_for_a_function_and_unknown_parameters_are_refused():
    with pytest.raises(InputError, match="takes no parameters, got factor"):
        load_reward("hostile_rewards:length", factor=3)
    with pytest.raises(InputError, match=r"cannot be made with parameters.*'colum'"):
        load_reward("exact_match", colum="answer")


def test_a_closure_is_refused_when_isolated():
    def closure(completions):
        return [0.0]

    for function in (closure, lambda completions: [0.0]):
        with pytest.raises(InputError, match=r"cannot run in a worker process(?s:.*)isolated=False"):
            RewardScorer([function])


def test_what_can_be_imported_is_sent_by_name_and_instances_as_they_are():
    assert sendable(load_reward("hostile_rewards:named_lambda")) == "hostile_rewards:named_lambda"
    assert sendable(load_reward(hostile_rewards.length)) == "hostile_rewards:length"
    assert sendable(load_reward("pattern_match", pattern="a")) == PatternMatch(pattern="a")


def test_math_match_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gruppo\[math\]'"):
        load_reward("math_match")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gruppo\[math\]'"):
        MathMatch()(completions=["1"], answer=["1"])
