"""Completions on disk: the numbers in the file are those of the rollouts, for every kind of rollout."""

import json
import re
import resource
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gruppo.codec import SCHEMA, UNTRAINED, decode, encode, from_bytes, to_bytes
from gruppo.run.completions import ROWS_LEFT_OUT, completions_table
from gruppo.run.directory import RunDirectory
from gruppo.trainer.learner import TokenRecord
from gruppo.types import Group, Prompt, Rollout, Trajectory

PROMPT = Prompt(token_ids=(1, 5), text="1+6=", columns={"answer": "7", "level": 2}, index=4)


def trajectory(**changes: Any) -> Trajectory:
    made = Trajectory(
        prompt=PROMPT,
        tokens=(8, 2),
        logps=(-0.1, -0.25),
        entropies=(0.3, 0.7),
        text="seven",
        versions=(2, 3),
    )
    return replace(made, **changes)


def group(*rollouts: Rollout, **changes: Any) -> Group:
    return replace(Group(prompt=PROMPT, rollouts=rollouts), **changes)


def rows(*groups: Group, step: int = 1, limit: int | None = None) -> list[dict[str, Any]]:
    return completions_table(step, groups, limit).to_pylist()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_row_holds_everything_of_its_rollout(run: RunDirectory) -> None:
    first = Rollout(
        trajectory=trajectory(),
        reward=1.0,
        rewards={"match": 1.0, "form": None},
        correct=True,
        extras={"words": 3},
        shaped=0.75,
        advantage=0.5,
        old_logps=(-0.11, -0.26),
        ref_logps=(-0.4, -0.5),
        policy_logps=(-0.12, -0.27),
        entropies=(0.31, 0.71),
    )
    second = Rollout(
        trajectory=trajectory(tokens=(9,), logps=None, entropies=None, text="", stop_reason="length"),
        errors={"form": "KeyError: 7"},
    )
    run.write_completions(3, [group(first, second)])
    found = run.completions(3).to_pylist()
    assert found[0] == {
        "step": 3,
        "prompt_index": 4,
        "sample": 0,
        "status": "kept",
        "prompt": "1+6=",
        "prompt_ids": [1, 5],
        "columns": '{"answer": "7", "level": 2}',
        "completion": "seven",
        "messages": None,
        "stop_reason": "stop",
        "versions": [2, 3],
        "reward": 1.0,
        "correct": True,
        "shaped": 0.75,
        "advantage": 0.5,
        "token_advantages": None,
        "tokens": [8, 2],
        "sampled": None,
        "logps": [-0.1, -0.25],
        "old_logps": [-0.11, -0.26],
        "policy_logps": [-0.12, -0.27],
        "ref_logps": [-0.4, -0.5],
        "entropies": [0.31, 0.71],
        "untrained": ["", ""],
        "clipped": None,
        "reward/form": None,
        "reward/match": 1.0,
        "extra/words": 3,
        "error/form": None,
    }
    assert found[1] == {
        "step": 3,
        "prompt_index": 4,
        "sample": 1,
        "status": "kept",
        "prompt": "1+6=",
        "prompt_ids": [1, 5],
        "columns": '{"answer": "7", "level": 2}',
        "completion": "",
        "messages": None,
        "stop_reason": "length",
        "versions": [2, 3],
        "reward": None,
        "correct": None,
        "shaped": None,
        "advantage": 0.0,
        "token_advantages": None,
        "tokens": [9],
        "sampled": None,
        "logps": None,
        "old_logps": None,
        "policy_logps": None,
        "ref_logps": None,
        "entropies": None,
        "untrained": ["no_advantage"],
        "clipped": None,
        "reward/form": None,
        "reward/match": None,
        "extra/words": None,
        "error/form": "KeyError: 7",
    }


def test_entropies_of_the_sampler_stand_in_for_those_of_the_update() -> None:
    assert rows(group(Rollout(trajectory=trajectory())))[0]["entropies"] == [0.3, 0.7]


def test_every_file_has_the_same_columns_of_the_same_types_whatever_is_known(run: RunDirectory) -> None:
    bare = Rollout(trajectory=Trajectory(prompt=Prompt(token_ids=()), tokens=()))
    run.write_completions(1, [group(Rollout(trajectory=trajectory(), advantage=(0.5, 0.0), old_logps=(-1.0, -2.0)))])
    run.write_completions(2, [group(bare)])
    run.write_completions(3, [])
    tables = [run.completions(step) for step in (1, 2, 3)]
    assert [table.num_rows for table in tables] == [1, 1, 0]
    assert all(table.schema.equals(SCHEMA) for table in tables)
    assert pa.concat_tables(tables).num_rows == 2


def test_tokens_of_others_hold_no_numbers_and_shift_none() -> None:
    spoken = trajectory(
        tokens=(8, 90, 91, 2),
        sampled=(True, False, False, True),
        logps=(-0.1, -0.25),
        entropies=(0.3, 0.7),
    )
    told = Rollout(trajectory=spoken, advantage=(0.5, -0.5), ref_logps=(-1.0, -2.0), clipped=(-1, 1))
    alone = Rollout(trajectory=trajectory(), advantage=1.0, old_logps=(-3.0, -4.0))
    first, second = rows(group(told, alone))
    assert first["sampled"] == [True, False, False, True] and second["sampled"] is None
    assert first["logps"] == [-0.1, None, None, -0.25] and second["logps"] == [-0.1, -0.25]
    assert first["token_advantages"] == [0.5, None, None, -0.5] and first["advantage"] is None
    assert second["token_advantages"] is None and second["advantage"] == 1.0
    assert first["ref_logps"] == [-1.0, None, None, -2.0] and second["ref_logps"] is None
    assert first["old_logps"] is None and second["old_logps"] == [-3.0, -4.0]
    assert first["untrained"] == ["", "other", "other", ""] and second["untrained"] == ["", ""]
    assert first["clipped"] == [-1, None, None, 1] and second["clipped"] is None


# --- what updates saw -------------------------------------------------------------------------------------------------


KINDS = {"policy_logps": torch.float32, "entropies": torch.float32, "rejected": torch.bool, "clipped": torch.int8}


def recorded(groups: list[Group], *updates: tuple[list[int], list[int], dict[str, list[float]]]) -> list[Group]:
    record = TokenRecord()
    for indices, lengths, columns in updates:
        record.of(0)(tuple(indices), lengths, {n: torch.tensor(x, dtype=KINDS[n]) for n, x in columns.items()})
    return record.given_to(groups)()


def test_numbers_of_the_last_update_stand_above_those_of_the_rollout() -> None:
    """Two groups that are trained on, with one between them that is not; a second epoch without the first rollout."""
    mixed = trajectory(tokens=(8, 90, 2), sampled=(True, False, True))
    left = Rollout(trajectory=trajectory(), advantage=1.0, old_logps=(-9.0, -9.5))
    groups = [
        group(Rollout(trajectory=mixed, advantage=1.0), Rollout(trajectory=trajectory(), is_masked=True)),
        group(left, status="no_signal"),
        group(Rollout(trajectory=trajectory(tokens=(7,), logps=None, entropies=None), advantage=-1.0, clipped=(0,))),
    ]
    found = recorded(
        groups,
        ([2, 0], [1, 2], {"policy_logps": [-1, -2, -3], "rejected": [1, 0, 1], "clipped": [1, 0, -1]}),
        ([1], [2], {"policy_logps": [-5, -6]}),  # masked: what an update saw of it is nothing that it trained on
        ([2], [1], {"policy_logps": [-4.5], "rejected": [0], "clipped": [0], "entropies": [0.5]}),
    )
    names = ("old_logps", "policy_logps", "entropies", "clipped", "untrained")
    first, masked, other, last = rows(*found)
    assert [first[name] for name in names] == [
        None,
        [-2.0, None, -3.0],
        [0.3, None, 0.7],
        [0, None, -1],
        ["", "other", "rejected"],
    ]
    assert [masked[name] for name in names] == [None, None, [0.3, 0.7], None, ["masked"] * 2]
    assert [other[name] for name in names] == [[-9.0, -9.5], None, [0.3, 0.7], None, ["left_out"] * 2]
    assert [last[name] for name in names] == [None, [-4.5], [0.5], [0], [""]]


def test_rollouts_beyond_the_limit_do_not_shift_what_updates_saw() -> None:
    one = Rollout(trajectory=trajectory(tokens=(7,), logps=None, entropies=None), advantage=1.0)
    groups = [group(one, one, status="no_signal"), group(one, one, one), group(one, one)]
    found = recorded(groups, ([0, 3, 4, 1], [1] * 4, {"policy_logps": [-10, -13, -14, -11]}))
    whole, limited = (completions_table(1, found, limit) for limit in (None, 3))
    assert whole["policy_logps"].to_pylist() == [None, None, [-10.0], [-11.0], None, [-13.0], [-14.0]]
    assert limited["policy_logps"].to_pylist() == [[-10.0], [-11.0], None]


# --- back from the table ----------------------------------------------------------------------------------------------


def test_what_was_encoded_is_read_back_as_it_was() -> None:
    """Also turns of others, advantages per token, failures, and the greedy completion; but for entropies of the sampler
    where an update has seen others, and the marks of what a loss rejected."""
    spoken = trajectory(tokens=(8, 90, 91, 2), sampled=(True, False, False, True))
    greedy = Rollout(trajectory=trajectory(entropies=None), reward=1.0, rewards={"f": 1.0, "g": None})
    waiting = Rollout(trajectory=spoken, reward=0.1 + 0.2, rewards={"f": 0.1 + 0.2, "g": None}, correct=False)
    failed = Rollout(trajectory=trajectory(stop_reason="length"), rewards={"f": None, "g": None}, errors={"f": "no"})
    trained = Rollout(
        trajectory=trajectory(entropies=None),
        rewards={"f": 2.0, "g": 1.0},
        extras={"words": 3},
        shaped=0.75,
        advantage=(0.5, -0.5),
        old_logps=(-0.1, -1e-300),
        ref_logps=(-0.2, -0.3),
        policy_logps=(-0.4, -0.5),
        entropies=(0.6, 0.7),
        clipped=(-1, 1),
    )
    masked = Rollout(trajectory=trajectory(), rewards={"f": None, "g": None}, is_masked=True)
    groups = [
        group(waiting, failed, status="surplus", greedy=greedy),
        group(trained, masked, prompt=Prompt(token_ids=(1,), text="two", columns={"answer": None}, index=9)),
    ]
    for each in groups[1].rollouts:
        object.__setattr__(each.trajectory, "prompt", groups[1].prompt)
    tables = from_bytes(to_bytes(encode(groups, with_greedy=True)) + to_bytes(encode(groups[1:], step=3)))
    assert decode(tables[0]) == groups and decode(tables[1]) == groups[1:]
    assert tables[1]["step"].to_pylist() == [3, 3]
    assert decode(encode(groups)) == [replace(groups[0], greedy=None), groups[1]]


def test_prompts_of_the_data_set_stand_in_for_those_of_the_table() -> None:
    whole = replace(PROMPT, source="as it stood", columns={"answer": object()})
    ((found,),) = [g.rollouts for g in decode(encode([group(Rollout(trajectory=trajectory()))]), {4: whole})]
    assert found.trajectory.prompt is whole


# --- episodes ---------------------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 6}'}}
MESSAGES: Any = (
    {"role": "assistant", "content": "", "tool_calls": [CALL, {"error": "no JSON"}]},
    {"role": "tool", "content": "7\n\x1b[2J</script>\u202e", "name": "add"},
    {"role": "tool", "content": "no JSON", "is_error": True},
    {"role": "assistant", "content": "seven"},
)


def test_the_messages_of_an_episode_are_json_and_read_back_as_they_were() -> None:
    talked = trajectory(messages=MESSAGES, stop_reason="done")
    silent = trajectory(messages=())
    groups = [group(Rollout(trajectory=talked), Rollout(trajectory=silent), Rollout(trajectory=trajectory()))]
    written = encode(groups)["messages"].to_pylist()
    assert [None if text is None else json.loads(text) for text in written] == [list(MESSAGES), [], None]
    assert decode(encode(groups)) == groups


def test_a_lost_episode_says_why_after_it_was_read_back() -> None:
    lost = trajectory(messages=MESSAGES[:1], stop_reason="env_error", error="ZeroDivisionError: 1/0")
    groups = [group(Rollout(trajectory=lost, errors={"environment": lost.error}))]
    assert decode(encode(groups)) == groups
    ended = [group(Rollout(trajectory=trajectory(), errors={"environment": "a reward of that name"}))]
    assert decode(encode(ended))[0].rollouts[0].trajectory.error == ""


def test_a_prompt_of_its_own_stays_with_its_trajectory() -> None:
    own = replace(PROMPT, token_ids=(1, 9), text="9+6=")
    groups = [group(Rollout(trajectory=trajectory()), Rollout(trajectory=trajectory(prompt=own)))]
    assert encode(groups)["prompt_ids"].to_pylist() == [[1, 5], [1, 9]]
    assert encode(groups)["prompt"].to_pylist() == ["1+6=", "9+6="]
    assert decode(encode(groups)) == groups
    whole = replace(PROMPT, columns={"answer": object()})
    (found,) = decode(encode(groups), {4: whole})
    assert found.prompt is whole and found.rollouts[0].trajectory.prompt is whole
    assert found.rollouts[1].trajectory.prompt == replace(whole, token_ids=(1, 9), text="9+6=")


def test_a_group_of_which_every_trajectory_has_its_own_prompt_keeps_that_of_the_data_set() -> None:
    own = [replace(PROMPT, token_ids=(1, n), text=f"{n}+6=") for n in (8, 9)]
    groups = [group(*(Rollout(trajectory=trajectory(prompt=prompt)) for prompt in own))]
    (found,) = decode(encode(groups), {4: PROMPT})
    assert [found.prompt, *(r.trajectory.prompt for r in found.rollouts)] == [PROMPT, *own]


def test_a_table_from_before_episodes_is_read() -> None:
    groups = [group(Rollout(trajectory=trajectory()))]
    assert decode(encode(groups).drop_columns(["messages"])) == groups
    with pytest.raises(ValueError, match="no column 'versions' of type"):
        decode(encode(groups).drop_columns(["versions"]))


# --- why a token is not trained on ------------------------------------------------------------------------------------

MIXED = {"tokens": (8, 90, 2), "sampled": (True, False, True)}


@pytest.mark.parametrize(
    ("rollout", "status", "expected"),
    [
        ({"advantage": 0.5}, "kept", ["", "other", ""]),
        ({"advantage": 0.0}, "kept", ["no_advantage", "other", "no_advantage"]),
        ({"advantage": 0.5, "is_masked": True}, "kept", ["masked", "other", "masked"]),
        ({"advantage": 0.0, "is_masked": True}, "kept", ["masked", "other", "masked"]),
        ({"advantage": 0.5, "rejected": (False, True)}, "kept", ["", "other", "rejected"]),
        ({"advantage": 0.0, "rejected": (False, True)}, "kept", ["no_advantage", "other", "no_advantage"]),
        ({"advantage": (0.0, 0.5)}, "kept", ["no_advantage", "other", ""]),
        ({"advantage": (0.0, 0.0)}, "kept", ["no_advantage", "other", "no_advantage"]),
        ({"advantage": (0.0, 0.5), "rejected": (True, True)}, "kept", ["no_advantage", "other", "rejected"]),
        ({"advantage": 0.0}, "no_signal", ["left_out", "other", "left_out"]),
        ({"advantage": 0.5}, "surplus", ["left_out", "other", "left_out"]),
    ],
)
def test_the_reason_why_a_token_is_not_trained_on(rollout: dict[str, Any], status: Any, expected: list[str]) -> None:
    made = Rollout(trajectory=trajectory(**MIXED), **rollout)
    assert rows(group(made, status=status))[0]["untrained"] == expected
    assert set(expected) <= set(UNTRAINED)


def test_reasons_stay_with_their_rollouts() -> None:
    plain = trajectory(tokens=(3, 4, 5), logps=None, entropies=None)
    made = [
        Rollout(trajectory=plain, advantage=1.0, rejected=(False, True, False)),
        Rollout(trajectory=replace(plain, tokens=()), advantage=1.0),
        Rollout(trajectory=plain, advantage=(0.0, 1.0, 0.0)),
        Rollout(trajectory=plain, advantage=1.0),
    ]
    assert [row["untrained"] for row in rows(group(*made))] == [
        ["", "rejected", ""],
        [],
        ["no_advantage", "", "no_advantage"],
        ["", "", ""],
    ]


def test_a_name_with_half_a_character_is_a_column_too() -> None:
    made = Rollout(trajectory=trajectory(), extras={"a\ud800": 1}, errors={"f\udc00": "no"})
    (row,) = rows(group(made))
    assert (row["extra/a?"], row["error/f?"]) == (1, "no")


# --- what users bring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logged", "written"),
    [
        ((1, 0.5), [1.0, 0.5]),
        ((1, None), [1, None]),
        ((True, False), [True, False]),
        (("a", None), ["a", None]),
        ((2, "b\ud800"), ["2", "b?"]),
        ((True, 1), ["true", "1"]),
        (([0.5, 1.0], [2.0]), [[0.5, 1.0], [2.0]]),
        (([1, "a"], [2]), ['[1, "a"]', "[2]"]),
        (([[1], [2]], []), ["[[1], [2]]", "[]"]),
        (({}, {}), ["{}", "{}"]),
        (({"a": 1}, {"b": [float("nan")]}), ['{"a": 1}', '{"b": [null]}']),
        ((2**70, 1), [str(2**70), "1"]),
        (([["\ud800"]], [["x"]]), ['[["?"]]', '[["x"]]']),
        ((None, None), [None, None]),
    ],
)
def test_what_rewards_logged_is_written_whatever_its_type(
    logged: tuple[Any, Any], written: list[Any], run: RunDirectory
) -> None:
    run.write_completions(1, [group(*(Rollout(trajectory=trajectory(), extras={"x": value}) for value in logged))])
    assert run.completions(1)["extra/x"].to_pylist() == written
    assert run.dropped == 0


def test_a_column_that_one_rollout_lacks_is_null_there() -> None:
    made = group(Rollout(trajectory=trajectory(), extras={"x": 1}), Rollout(trajectory=trajectory(), extras={"y": 2}))
    assert [(row["extra/x"], row["extra/y"]) for row in rows(made)] == [(1, None), (None, 2)]


def test_columns_of_the_row_are_json_whatever_they_hold() -> None:
    columns: Mapping[str, Any] = {"day": date(2026, 1, 2), "score": float("nan"), "more": [1, {"é": float("inf")}]}
    made = group(Rollout(trajectory=trajectory()), prompt=replace(PROMPT, columns=columns))
    (row,) = rows(made)
    assert json.loads(row["columns"]) == {"day": "2026-01-02", "score": None, "more": [1, {"é": None}]}


@pytest.mark.row("R-48", "a lone surrogate")
def test_a_lone_surrogate_is_written_with_a_replacement(run: RunDirectory) -> None:
    hostile = "a\ud800b</script>\x1b[2J"
    prompt = replace(PROMPT, text=hostile, columns={"answer": hostile})
    said = trajectory(text=hostile, prompt=prompt)
    rollout = Rollout(trajectory=said, extras={"x": hostile}, errors={"f": hostile})
    run.write_completions(1, [group(rollout, prompt=prompt)])
    (row,) = run.completions(1).to_pylist()
    clean = "a?b</script>\x1b[2J"
    assert [row[name] for name in ("completion", "prompt", "extra/x", "error/f")] == [clean] * 4
    assert json.loads(row["columns"]) == {"answer": clean}


# --- limits -----------------------------------------------------------------------------------------------------------


def numbered_groups() -> list[Group]:
    statuses = ("no_signal", "kept", "surplus", "kept", "no_signal")
    rollout = Rollout(trajectory=trajectory())
    return [
        group(rollout, rollout, status=status, prompt=replace(PROMPT, index=i)) for i, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (None, [0, 1, 2, 3, 4]),
        (10, [0, 1, 2, 3, 4]),
        (9, [0, 1, 2, 3]),  # whole groups, in the order of the draw
        (6, [0, 1, 3]),
        (5, [1, 3]),  # those that are trained on before all others
        (2, [1]),
        (1, []),
    ],
)
def test_a_limit_takes_whole_groups_and_those_that_are_trained_on_first(limit: int | None, kept: list[int]) -> None:
    table = completions_table(1, numbered_groups(), limit)
    assert table["prompt_index"].to_pylist() == [i for i in kept for _ in range(2)]
    assert int(table.schema.metadata[ROWS_LEFT_OUT]) == 10 - 2 * len(kept)


def test_the_number_of_rows_left_out_is_in_the_file(run: RunDirectory) -> None:
    assert run.write_completions(1, numbered_groups(), limit=5) == 6
    assert run.write_completions(2, numbered_groups(), limit=10) == 0
    files = [run.path / "completions" / f"step-{step:06d}.parquet" for step in (1, 2)]
    assert [pq.read_schema(file).metadata[ROWS_LEFT_OUT] for file in files] == [b"6", b"0"]
    assert [run.completions(step).num_rows for step in (1, 2)] == [4, 10]


@pytest.mark.row("R-48", "a text of megabytes")
def test_a_long_text_is_not_cut(run: RunDirectory) -> None:
    run.write_completions(1, [group(Rollout(trajectory=trajectory(text="x" * 10_000_000)))])
    assert len(run.completions(1)["completion"][0].as_py()) == 10_000_000


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_counted_and_leaves_nothing(run: RunDirectory) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        run.write_completions(1, numbered_groups())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.dropped == 1 and list((run.path / "completions").iterdir()) == []


def test_what_a_killed_writer_left_is_no_file_of_a_step_and_goes_when_the_run_goes_on(run: RunDirectory) -> None:
    run.write_completions(1, numbered_groups())
    (run.path / "completions" / ".step-000002.parquet.tmp-0a1b2c3d").write_bytes(b"PAR1")
    assert run.completion_steps() == [1]
    run.forget_after(5)
    assert [path.name for path in (run.path / "completions").iterdir()] == ["step-000001.parquet"]


def test_the_documented_columns_are_those_of_the_schema() -> None:
    page = (Path(__file__).parents[3] / "docs" / "run_directory.md").read_text(encoding="utf-8")
    table = page[page.index("| column |") :].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    assert [name for name in named if "/" not in name] == SCHEMA.names
    assert all(f"`{reason}`" in page for reason in UNTRAINED if reason)
