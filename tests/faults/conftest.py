"""Runs that are killed: a small data set, the options of a short run, and processes that end with their test."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_process import WarmProcess, gruppo

from gruppo.task.carries import carries_rows

SHORT: dict[str, Any] = {
    "prompts_per_step": 8,
    "group_size": 4,
    "max_new_tokens": 4,
    "steps": 20,
    "save_every": 5,
    "lr": 1e-3,
    "eval_prompts": 16,
    "eval_every": 10,
    "completions_every": 5,
    "tensorboard": False,
    "threads": 1,
}


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the embedded task's prompts."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in carries_rows("train")[::60]))
    return path


@pytest.fixture(scope="session")
def short_run(sums: Path) -> Callable[..., dict[str, Any]]:
    """Options of a short run into a directory."""

    def options(output: Path, **changes: Any) -> dict[str, Any]:
        return SHORT | {"data": str(sums), "output": str(output)} | changes

    return options


@pytest.fixture
def flags(short_run: Callable[..., dict[str, Any]]) -> Callable[..., list[str]]:
    """The same as words of a command line."""

    def words(output: Path, **changes: Any) -> list[str]:
        found = []
        for name, value in short_run(output, **changes).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                found += [f"--{flag}" if value else f"--no-{flag}"]
            else:
                found += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        return found

    return words


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WarmProcess]]:
    """Start `gruppo WORDS`, with faults planned as (site, step, action)."""
    processes: list[WarmProcess] = []

    def begin(words: list[str], *plan: tuple[str, int, str]) -> WarmProcess:
        log = tmp_path / f"process-{len(processes)}.log"
        processes.append(WarmProcess(log, gruppo, words, *plan))
        return processes[-1]

    yield begin
    for process in processes:
        process.close()
