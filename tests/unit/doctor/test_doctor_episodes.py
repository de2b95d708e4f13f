"""The doctor on the files of a run with episodes: what others wrote counts for no length and no repetition."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gruppo.doctor import findings
from gruppo.doctor.table import Table
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader
from gruppo.types import Group, Prompt, Rollout, Trajectory

PROMPT = Prompt(token_ids=(1,), text="37*48?", index=0)
TALK: Any = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
TURNS = {"turns/lost_frac": 0.4, "turns/cut_frac": 0.5, "completion/truncated_frac": 0.5}
TRACE = "Traceback (most recent call last):\n  ...\nKeyError: 'door'"


def episode(stop: Any, own: int = 12, given: int = 40, **facts: Any) -> Rollout:
    """Tokens of the policy that are all different, around those of another that are all the same."""
    tokens = (*range(100, 100 + own - 1), *(7,) * given, 99)
    sampled = tuple(token != 7 for token in tokens)
    made = Trajectory(prompt=PROMPT, tokens=tokens, sampled=sampled, messages=TALK, stop_reason=stop, **facts)
    errors = {"environment": made.error} if made.error else {}
    return Rollout(trajectory=made, reward=None if made.is_lost else 0.5, errors=errors)


def written(path: Path) -> RunReader:
    lost = episode("env_error", error=TRACE)
    group = Group(
        prompt=PROMPT, rollouts=(episode("turns"), episode("turns"), episode("length"), lost, episode("stop"))
    )
    with RunDirectory.create(str(path), "loss: grpo\nsteps: 20\n") as run:
        for step in range(1, 21):
            run.log_metrics(step, {"reward/mean": 0.5, "reward/std": 0.2, **TURNS})
            run.write_completions(step, [group])
        run.set_status("done", 20)
    return RunReader(path)


def test_lost_and_cut_episodes_are_told_with_what_the_completions_say(tmp_path: Path) -> None:
    found = {each.rule: each.text for each in findings(written(tmp_path / "run"))}
    assert found == {
        "lost_episodes": "episodes are lost because the environment fails: KeyError: 'door'",
        "cut_episodes": "many episodes are cut before they end, 67% of them by turns",
    }


def test_lengths_and_pieces_are_those_of_the_policys_tokens(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (first, *_) = Table.of(run).rollouts
    assert first.length_N.tolist() == [12] * 5 and first.distinct_N.tolist() == [1.0] * 5
    assert first.stops == {"turns": 2, "length": 1, "env_error": 1, "stop": 1}


def test_files_from_before_episodes_are_read(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    before = [each.rule for each in findings(run)]
    for step in run.completion_steps():
        pq.write_table(run.completions(step).drop_columns(["messages"]), run.completions_file(step))
    assert [each.rule for each in findings(run)] == before
