"""A run with turns, as its user sees it: what rewards are called with, the commands on it, and what is refused."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from turn_tools import multiply

from gruppo.cli.main import run as command
from gruppo.errors import InputError
from gruppo.replay import replay
from gruppo.reward import RewardScorer
from gruppo.reward.number import NumberMatch
from gruppo.reward.verifiers import ExactMatch
from gruppo.rollout.driver import Driver
from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.turns import Answer, Environment
from gruppo.types import Prompt, Trajectory

DATA = Path(__file__).parent / "products.jsonl"
SMALL: dict[str, Any] = {
    "model": "builtin-chat",
    "data": str(DATA),
    "max_new_tokens": 30,
    "max_turns": 3,
    "steps": 2,
    "save_every": 1,
    "keep_checkpoints": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "lr": 1e-3,
    "temperature": 1.5,
    "eval_prompts": 6,
    "completions_every": 1,
    "tensorboard": False,
    "threads": 1,
}


def words(**options):
    found = []
    for name, value in (SMALL | options).items():
        flag = name.replace("_", "-")
        found += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return found


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_reward_is_called_with_messages_calls_and_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    rewards = ["turn_rewards:notes_completions", "exact_match"]
    options = SMALL | {"output": str(tmp_path / "run"), "rewards": rewards, "eval_prompts": 0}
    config = TrainConfig(**options, tools=["turn_tools:multiply"])
    with contextlib.closing(GRPOTrainer(config, quiet=True)) as trainer:
        (tmp_path / "notes").unlink(missing_ok=True)
        trainer.step()
        rollouts = [r for group in trainer.groups for r in group.rollouts]
    noted = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    key = lambda seen: json.dumps(seen)  # noqa: E731  # workers take the groups in any order
    expected = [
        [r.trajectory.prompt.source, r.trajectory.messages, r.trajectory.sampled_tokens, r.trajectory.prompt.columns]
        for r in rollouts
    ]
    expected = [[prompt, messages, ids, columns["answer"]] for prompt, messages, ids, columns in expected]
    assert sorted(map(key, noted)) == sorted(map(key, expected))
    called = [completion for _, completion, _, _ in noted if len(completion) > 1]
    assert called
    for asks, answers, *_ in called:
        (call,) = asks["tool_calls"]
        assert (asks["role"], answers["role"], answers["name"]) == ("assistant", "tool", "multiply")
        if not answers.get("is_error"):
            arguments = call["function"]["arguments"]
            assert answers["content"] == str(multiply(**arguments))
    assert [r.rewards["notes_completions"] for r in rollouts] == [
        float(len(r.trajectory.messages) > 1) for r in rollouts
    ]


def test_a_verifier_reads_the_policys_words_and_not_a_tools_answer():
    """An episode that was cut after the tool's answer, which is the right one."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 37, "b": 48}}}
    asks = {"role": "assistant", "content": "I ask 5", "tool_calls": [call]}
    tool = {"role": "tool", "name": "multiply", "content": "1776"}
    prompt = Prompt(token_ids=(5,), source=[{"role": "user", "content": "37*48="}], columns={"answer": "1776"})
    cut = Trajectory(
        prompt=prompt, tokens=(7,), sampled=(True,), text="I ask 5", stop_reason="turns", messages=(asks, tool)
    )
    says = Trajectory(
        prompt=prompt,
        tokens=(7,),
        sampled=(True,),
        text="1776",
        messages=(asks, tool, {"role": "assistant", "content": "1776"}),
    )
    with RewardScorer([ExactMatch(), NumberMatch()], workers=1) as scorer:
        driver = Driver(sampler=None, scorer=scorer, player=object())  # type: ignore[arg-type]  # neither is used
        ((group,), _) = driver.score([prompt], [(cut, says)], step=0, seed=0)
    assert [list(r.rewards.values()) for r in group.rollouts] == [[0, 0], [1, 1]]
    assert [r.correct for r in group.rollouts] == [False, True]


class Seeds(Environment):
    """Notes the seeds that its episodes begin with."""

    seen: list[tuple[str, int]] = []  # noqa: RUF012

    async def reset(self, row, seed):
        Seeds.seen.append((row["prompt"][0]["content"], seed))

    async def step(self, message):
        return Answer(is_over=True)


def test_the_greedy_episode_that_remax_compares_with_begins_as_its_group_does(tmp_path):
    Seeds.seen.clear()
    config = TrainConfig(**SMALL | {"output": str(tmp_path / "run"), "advantage": "remax", "eval_prompts": 0})
    with contextlib.closing(GRPOTrainer(config, environment=Seeds, quiet=True)) as trainer:
        trainer.step()
        first = {*Seeds.seen}
        assert (len(Seeds.seen), len(first)) == (4 * 5, 4)
        trainer.step()
    assert len({seed for _, seed in Seeds.seen}) == 8


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run by the command line."""
    folder = tmp_path_factory.mktemp("turns") / "run"
    assert command(["train", *words(output=folder), "--tools", "gruppo.task.calculator:multiply"]) == 0
    return folder


def test_a_run_by_the_command_line_plays_episodes(trained):
    metrics = RunReader(trained).metrics()
    assert all(line["turns/mean"] > 1 and line["turns/calls"] > 0 for line in metrics if line["step"] > 0)
    assert RunReader(trained).config()["max_turns"] == 3


def test_eval_plays_the_episodes_of_the_run(trained, capsys):
    assert command(["eval", str(trained), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    last = RunReader(trained).metrics()[-1]
    assert scored["eval/accuracy"] == last["eval/accuracy"]
    table = pq.read_table(trained / "eval.parquet").to_pylist()
    assert all(row["messages"] is not None for row in table)


def test_sample_plays_episodes_and_writes_them(trained, tmp_path, capsys):
    output = tmp_path / "samples.parquet"
    found = ["--run", str(trained), "--num-samples", "16", "--seed", "3", "--output", str(output)]
    assert command(["sample", "37*48=", *found]) == 0
    assert "37*48=" in capsys.readouterr().out
    rows = pq.read_table(output).to_pylist()
    tools = [m for row in rows for m in json.loads(row["messages"]) if m["role"] == "tool"]
    assert len(rows) == 16 and "1776" in {message["content"] for message in tools}


@pytest.mark.parametrize("verb", ["report", "doctor"])
def test_other_commands_read_the_run(verb, trained, capsys):
    assert command([verb, str(trained)]) == 0
    assert capsys.readouterr().out


def test_replay_gives_the_recorded_gradient_of_episodes(trained):
    metrics = RunReader(trained).metrics()
    step = next(line["step"] for line in metrics if line.get("optim/grad_norm"))
    found = replay(RunReader(trained), step, ["gspo"])
    assert found.weights is not None
    assert found.replayed_norm == pytest.approx(found.recorded_norm, rel=1e-6)
    assert len(found.variants) == 2
    assert not all(all(marks) for marks in found.sampled)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tools", "message"),
    [
        (
            {"streaming": True, "max_staleness": 1},
            "turn_tools:multiply",
            r"streaming=true cannot go with tools=\['turn_tools:multiply'\].*Leave streaming out",
        ),
        (
            {"model": "builtin", "data": "builtin:carries"},
            "turn_tools:multiply",
            r"tools need conversations, and these prompts are text; set chat=true",
        ),
        (
            {"model": "builtin"},
            "turn_tools:multiply",
            r"conversations with tools, but this tokenizer has no chat template; use the tokenizer of an "
            r"instruction-tuned model, or set tokenizer.chat_template$",
        ),
        (
            {},
            "turn_tools:no_text",
            r"tool 'no_text' cannot be described to the model: .*docstring.*give each parameter a type hint, and the "
            r"docstring",
        ),
        ({}, "turn_tools:multipy", r"has no 'multipy' for tool 'turn_tools:multipy' \(did you mean 'multiply'\?\)"),
    ],
    ids=["streaming", "text prompts", "no template", "no docstring", "a wrong name"],
)
def test_what_cannot_go_with_tools_is_refused_with_a_remedy(options, tools, message, tmp_path):
    with pytest.raises(InputError, match=message):
        command(["train", *words(output=tmp_path / "run", **options), "--tools", tools])
    assert not (tmp_path / "run").exists()


def test_a_run_with_tools_that_are_objects_can_be_evaluated_with_their_names_alone(tmp_path):
    run = tmp_path / "run"
    config = TrainConfig(**SMALL | {"output": str(run), "steps": 1})
    with contextlib.closing(GRPOTrainer(config, tools=[multiply], quiet=True)) as trainer:
        trainer.train()
    with pytest.raises(
        InputError, match=r"made with Python objects, which its directory cannot hold: tools='multiply'"
    ):
        command(["eval", str(run)])
    with pytest.raises(InputError, match=r"cannot hold: multiply; name them: --tools module:function"):
        command(["sample", "1*1=", "--run", str(run)])
    assert command(["eval", str(run), "--tools", "turn_tools:multiply"]) == 0
