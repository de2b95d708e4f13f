"""R-13, R-16, R-19 and R-48: rewards that fail in a real run, and what reaches the terminal of what they quote."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_process import WarmProcess, gruppo

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Flags = Callable[..., list[str]]

HOSTILE = r"\x1b[2J\x1b]0;owned\x07\x08\x9b31m\u202e"
"""Clears a screen, sets a title, rings, goes back, colours, and turns the direction of writing, as a Python literal."""

MODULE = f"""
import os, sys, time

HOSTILE = "{HOSTILE}"

def late(step):
    return step >= 3

def quotes(completions, step, **columns):
    if late(step):
        raise ValueError(f"cannot grade {{HOSTILE}} {{completions[0]}}")
    return [1.0] * len(completions)

def prints(completions, step, **columns):
    print(f"graded {{HOSTILE}}")
    print(f"logged {{HOSTILE}}", file=sys.stderr)
    return [float(len(c)) for c in completions]

def quotes_here(completions, step, **columns):
    return quotes(completions, step)

quotes_here.isolated = False

def dies(completions, step, **columns):
    if late(step):
        os._exit(3)
    return [float(len(c)) for c in completions]

def ranks(prompts, completions, step, **columns):
    if step == 2 and len(completions) > 1 and not os.path.exists("was_late"):
        open("was_late", "w").close()
        time.sleep(1000)
    best = {{p: max(len(set(c)) for q, c in zip(prompts, completions) if p == q) for p in prompts}}
    worst = {{p: min(len(set(c)) for q, c in zip(prompts, completions) if p == q) for p in prompts}}
    return [float(len(set(c)) == best[p] != worst[p]) for p, c in zip(prompts, completions)]
"""


@pytest.fixture
def train(start: Start, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WarmProcess]:
    (tmp_path / "run_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def begin(name: str, output: str = "run", **options: object) -> WarmProcess:
        settings = {"steps": 8, "eval_prompts": 0, "save_every": 2, **options}
        return start(["train", *flags(tmp_path / output, **settings), "--rewards", f"run_rewards:{name}"])

    return begin


@pytest.mark.parametrize("name", ["quotes", "quotes_here"])
def test_a_reward_error_that_quotes_a_completion_reaches_the_terminal_without_control_characters(
    name: str, train: Callable[..., WarmProcess], tmp_path: Path
) -> None:
    process = train(name)
    assert process.wait() == 4, process.output
    assert f"ValueError: cannot grade {HOSTILE}" in process.output
    assert all(c.isprintable() or c == "\n" for c in process.output)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and HOSTILE in status["error"]


@pytest.mark.row("R-20", "a reward module takes sys.stdout away")
def test_a_module_that_takes_standard_output_away_does_not_change_the_exit_code(
    train: Callable[..., WarmProcess], tmp_path: Path
) -> None:
    with (tmp_path / "run_rewards.py").open("a") as module:
        module.write("sys.stdout = None\n")
    process = train("prints", steps=2)
    assert process.wait() == 0, process.output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "done"


def test_what_a_reward_prints_reaches_the_terminal_without_control_characters(
    train: Callable[..., WarmProcess],
) -> None:
    process = train("prints", steps=2)
    assert process.wait() == 0, process.output
    assert f"graded {HOSTILE}\n" in process.output and f"logged {HOSTILE}\n" in process.output
    assert all(c.isprintable() or c == "\n" for c in process.output)


@pytest.mark.row("R-16", "workers that all die from step 3 on, with eight completions a step")
@pytest.mark.row("R-19", "workers that all die from step 3 on, with eight completions a step")
def test_a_reward_that_dies_on_everything_ends_a_run_of_small_steps(train: Callable[..., WarmProcess]) -> None:
    process = train("dies", prompts_per_step=2, group_size=4, steps=30)
    assert process.wait() == 4, process.output
    assert "17 of the last 32 completions failed, the budget is 50%" in process.output


def test_a_comparing_reward_that_is_late_once_gives_the_run_that_was_not(
    train: Callable[..., WarmProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = train("ranks", "late", reward_deadline=1)
    assert first.wait() == 0, first.output
    assert (tmp_path / "was_late").exists()
    assert "took longer than reward_deadline=1 s" in first.output
    second = train("ranks", "prompt", reward_deadline=60)
    assert second.wait() == 0, second.output
    assert "reward_deadline" not in second.output
    metrics = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("late", "prompt")]
    assert metrics[0] == metrics[1]
    means = [json.loads(line)["reward/mean"] for line in metrics[0].splitlines()]
    assert sum(means[3:]) > 0  # alone, every completion would get 0


def with_few_files(words: list[str]) -> None:
    """The command line where one more file can be opened when reward workers start."""
    import resource

    from gruppo.reward.workers import WorkerPool

    begin = WorkerPool.start

    def start_with_few(self: WorkerPool) -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        begin(self)

    WorkerPool.start = start_with_few
    gruppo(words)


def test_too_few_open_files_for_a_worker_are_named_with_the_limit(flags: Flags, tmp_path: Path) -> None:
    words = ["train", *flags(tmp_path / "run"), "--rewards", "test_reward_run:float_of_length"]
    process = WarmProcess(tmp_path / "log", with_few_files, words)
    assert process.wait() == 2, process.output
    process.close()
    assert "Too many open files" in process.output and "(ulimit -n)" in process.output
    assert "Traceback" not in process.output and not (tmp_path / "run").exists()


def float_of_length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]
