"""Completions that wait to be written when a run dies: a checkpoint never stands without those of its steps."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_resume import product
from warm_process import WarmProcess, gruppo

pytestmark = pytest.mark.slow

Flags = Callable[..., list[str]]


def with_a_slow_disk(arguments: Sequence[str], kill_at: int) -> None:
    """The command line where completions take a quarter of a second to write; SIGKILL once a checkpoint is there."""
    from gruppo.run.checkpoints import Checkpoints
    from gruppo.run.directory import RunDirectory

    write, save = RunDirectory.write_completions, Checkpoints.save

    def write_slowly(self: RunDirectory, *rest: Any) -> int:
        time.sleep(0.25)
        return write(self, *rest)

    def save_and_fall(self: Checkpoints, step: int, *rest: Any) -> None:
        save(self, step, *rest)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    RunDirectory.write_completions, Checkpoints.save = write_slowly, save_and_fall
    gruppo(arguments)


@pytest.mark.long
def test_a_run_killed_right_after_a_checkpoint_has_the_completions_of_an_undisturbed_one(
    flags: Flags, tmp_path: Path
) -> None:
    options = {"completions_every": 1, "save_every": 4, "steps": 8, "eval_prompts": 0}
    words = ["train", *flags(tmp_path / "killed", **options)]
    killed = WarmProcess(tmp_path / "killed.log", with_a_slow_disk, words, 4)
    assert killed.wait() == -signal.SIGKILL, killed.output
    written = sorted(path.name for path in (tmp_path / "killed" / "completions").iterdir())
    assert written == [f"step-{step:06d}.parquet" for step in range(1, 5)]
    for number, words in enumerate(
        (["resume", str(tmp_path / "killed")], ["train", *flags(tmp_path / "whole", **options)])
    ):
        process = WarmProcess(tmp_path / f"{number}.log", gruppo, words)
        assert process.wait() == 0, process.output
    assert product(tmp_path / "killed") == product(tmp_path / "whole")
    assert len(product(tmp_path / "whole")[2]) == 8
