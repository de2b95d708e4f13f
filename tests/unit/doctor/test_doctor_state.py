"""State of a run: from its records, in a word and a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from gruppo.cli.main import run as command
from gruppo.doctor import findings, state_line, summary
from gruppo.doctor.self_test import Check, self_test
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader


def recorded(path: Path, rewards: list[float], status: str = "done", **more: Any) -> RunReader:
    """A run directory with these rewards, and values that hold in every step."""
    with RunDirectory.create(str(path), "steps: 100\nmax_grad_norm: 1.0\n") as run:
        run.set_status("running", 0)
        for step, reward in enumerate(rewards, 1):
            run.log_metrics(step, {"reward/mean": reward, "reward/std": 0.5, "group/dead_frac": 0.1, **more})
        run.set_status(status, len(rewards), **({"error": "ValueError: \x1b[31mno"} if status == "failed" else {}))  # type: ignore[arg-type]
    return RunReader(path)


NOISE = [0.02, -0.02, 0.01, -0.01]
RISING = [0.2 + 0.01 * i + NOISE[i % 4] for i in range(40)]
FLAT = [0.2 + NOISE[i % 4] for i in range(40)]
FALLEN = RISING + [0.05] * 20


@pytest.mark.parametrize(
    ("rewards", "status", "name"),
    [
        (RISING[:9], "done", "too_early"),
        (RISING, "done", "finished"),
        (RISING, "stopped", "stopped"),
        (FLAT, "done", "stalled"),
        (FALLEN, "done", "collapsed"),
        (RISING, "running", "killed"),  # no process has its lock
        (RISING, "failed", "failed"),
    ],
)
def test_the_state_of_a_run_is_named(tmp_path: Path, rewards: list[float], status: str, name: str) -> None:
    assert state_line(recorded(tmp_path / "run", rewards, status)).name == name


def scored(path: Path, rewards: list[float], scores: list[float]) -> str:
    """State of a run with evaluations of 0.1 to either side."""
    with RunDirectory.create(str(path), "steps: 100\n") as run:
        run.set_status("running", 0)
        for step, reward in enumerate(rewards, 1):
            values = {"reward/mean": reward, "reward/std": 0.5}
            if step % 20 == 0:
                score = scores[step // 20 - 1]
                values |= {"eval/accuracy": score, "eval/accuracy_low": score - 0.1, "eval/accuracy_high": score + 0.1}
            run.log_metrics(step, values)
        run.set_status("done", len(rewards))
    state = state_line(RunReader(path))
    return f"{state.name}: {state.text.partition(', ')[2]}"


def test_a_reward_that_rises_while_the_held_out_accuracy_falls_is_no_learning(tmp_path: Path) -> None:
    assert scored(tmp_path / "a", RISING, [0.5, 0.0]).startswith(
        "collapsed: collapsed: held-out accuracy fell from 0.500 to 0.000; reward 0.295 -> 0.495"
    )
    assert scored(tmp_path / "b", RISING, [0.9, 0.6]).startswith("stalled: stalled: reward 0.295 -> 0.495")
    assert scored(tmp_path / "c", RISING, [0.5, 0.4]).startswith("finished: it learned: reward 0.295 -> 0.495")
    assert scored(tmp_path / "d", FLAT, [0.2, 0.6]).startswith(
        "finished: it learned: held-out accuracy 0.200 -> 0.600, reward 0.200 -> 0.200"
    )


def test_a_policy_that_is_lost_within_the_first_steps_has_collapsed(tmp_path: Path) -> None:
    state = state_line(recorded(tmp_path / "run", [0.30, 0.28, *[0.0] * 58]))
    assert state.name == "collapsed" and "reward fell from 0.116 to 0.000" in state.text


def test_a_run_that_goes_on_is_learning(tmp_path: Path) -> None:
    with RunDirectory.create(str(tmp_path / "run"), "steps: 100\n") as run:
        run.set_status("running", 0)
        for step, reward in enumerate(RISING, 1):
            run.log_metrics(step, {"reward/mean": reward})
        assert state_line(RunReader(run.path)).name == "learning"


def test_a_run_without_a_status_file_has_a_state(tmp_path: Path) -> None:
    with RunDirectory.create(str(tmp_path / "run"), "steps: 100\n") as run:
        run.log_metrics(1, {"reward/mean": 1.0})
        state = state_line(RunReader(run.path))
    assert state.name == "too_early"
    assert state.text.startswith("without a status file that can be read, after step 1: too early to tell")


def test_the_sentence_has_the_numbers(tmp_path: Path) -> None:
    """By hand: means of the first and last 20 of 0.20, 0.21, ... 0.59; the noise cancels within four steps."""
    state = state_line(recorded(tmp_path / "run", RISING))
    assert state.text.startswith("finished after step 40, it learned: reward 0.295 -> 0.495 (noise 0.0")


def test_a_rise_with_a_problem_is_told_with_it(tmp_path: Path) -> None:
    state, found = summary(recorded(tmp_path / "run", RISING, **{"completion/truncated_frac": 0.9}))
    assert [each.rule for each in found] == ["truncation"]
    assert state.name == "finished" and state.text.endswith("; but most completions are cut off before they end")


def test_a_failed_run_gives_its_error_without_control_characters(tmp_path: Path) -> None:
    assert state_line(recorded(tmp_path / "run", RISING, "failed")).text == (
        "failed after step 40: ValueError: \\x1b[31mno"
    )


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", RISING)
    (run.path / "completions").mkdir()
    (run.path / "completions" / "step-000001.parquet").write_bytes(b"PAR1 not a file")
    folder = run.path / "checkpoints" / "step-000040"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "optimizer.json").write_text("[1]")
    (folder / "weights.safetensors").write_bytes(b"\xff" * 64)
    (run.path / "heldout.jsonl").write_text('{"prompt": 3}\n{"prompt": []}\n{}\nnot json\n')
    assert findings(run) == [] and state_line(run).name == "finished"


def test_the_command_prints_findings_and_exits_with_1_for_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = recorded(tmp_path / "sick", FLAT, **{"completion/truncated_frac": 0.9})
    well = recorded(tmp_path / "well", RISING)
    assert command(["doctor", str(sick.path)]) == 1
    printed = capsys.readouterr().out
    assert "problem: most completions are cut off before they end, since step 1\n" in printed
    assert "  evidence  completion/truncated_frac is 0.9, above 0.5\n" in printed
    assert command(["doctor", str(well.path)]) == 0
    assert capsys.readouterr().out.endswith("nothing stands out\n")
    assert command(["doctor", str(sick.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["state"]["name"] == "stalled"
    assert [(each["rule"], each["metric"], each["step"]) for each in found["findings"]] == [
        ("truncation", "completion/truncated_frac", 1)
    ]


def test_the_self_test_passes_and_finds_a_broken_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(check.is_passed for check in self_test())
    from gruppo.model import TransformersModel

    real = TransformersModel.forward_backward

    def forgets_a_part(self: Any, inputs: Any, **given: Any) -> Any:
        split = self.planner.tokens_per_microbatch is not None
        return real(self, inputs[:-1] if split else inputs, **given)

    monkeypatch.setattr(TransformersModel, "forward_backward", forgets_a_part)
    failed = [check.name for check in self_test() if not check.is_passed]
    assert failed == ["gradients do not depend on the split into micro-batches"]
    assert command(["doctor"]) == 1
    assert "FAILED  gradients do not depend on the split" in capsys.readouterr().out


def test_a_check_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gruppo.model import TransformersModel

    def breaks(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(TransformersModel, "save", breaks)
    checks: list[Check] = list(self_test())
    assert [check.is_passed for check in checks] == [True, True, False, True]
    assert checks[2].detail == "OSError: no space"


def test_the_rules_page_names_every_finding() -> None:
    """Names are read from the source: a finding is made where one is found."""
    import re

    from gruppo.doctor import completion_rules, metric_rules

    root = Path(__file__).parents[3]
    source = "".join(Path(m.__file__).read_text(encoding="utf-8") for m in (metric_rules, completion_rules))
    names = set(re.findall(r'rule="(\w+)"', source)) | {rule for rule, _ in metric_rules.RANGES.values()}
    names |= set(re.findall(r'_dead\(\s*"(\w+)"', source))
    page = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.split("| finding |")[1].split("\n\n")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert listed == names and len(names) > 15
