"""State of a run: from its records, in a word and a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

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
            values = {"reward/mean": reward, "reward/std": 0.5, "reward/correct_frac": reward}
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
    assert scored(tmp_path / "b", RISING, [0.9, 0.6]).startswith(
        "stalled: stalled: held-out accuracy 0.900 -> 0.600, reward 0.295 -> 0.495"
    )
    assert scored(tmp_path / "d", FLAT, [0.2, 0.6]).startswith(
        "finished: it learned: held-out accuracy 0.200 -> 0.600, reward 0.200 -> 0.200"
    )


def test_training_samples_decide_only_where_held_out_prompts_leave_it_open(tmp_path: Path) -> None:
    """Samples gain 0.2. By hand, a change of the score by d is known to d -+ sqrt(0.1^2 + 0.1^2) = d -+ 0.141."""
    assert scored(tmp_path / "fits", RISING, [0.5, 0.6]).startswith(  # -0.041 to 0.241
        "finished: it learned: reward 0.295 -> 0.495"
    )
    assert scored(tmp_path / "does not fit", RISING, [0.5, 0.55]).startswith(  # -0.091 to 0.191
        "stalled: stalled: held-out accuracy 0.500 -> 0.550, reward 0.295 -> 0.495"
    )


def recorded_scores(path: Path, steps: int, keys: dict[str, list[float]], **config: object) -> RunReader:
    """A run with these numbers; those of `eval/` are of the start and of the end."""
    with RunDirectory.create(str(path), yaml.safe_dump({"steps": steps, **config})) as run:
        run.set_status("running", 0)
        run.log_event("start", step=0, correct_by=config.get("correct_by"), weights=config.get("weights"))
        held_out = {key: values for key, values in keys.items() if key.startswith("eval/")}
        if held_out:
            run.log_metrics(0, {key: values[0] for key, values in held_out.items()})
        for step in range(1, steps + 1):
            last = {key: values[1] for key, values in held_out.items()} if step == steps else {}
            run.log_metrics(step, {k: v[step - 1] for k, v in keys.items() if k not in held_out} | last)
        run.set_status("done", steps)
    return RunReader(path)


def noisy(first: float, last: float, steps: int = 40, noise: float = 0.01) -> list[float]:
    """A straight line with alternating noise."""
    return [first + (last - first) * i / (steps - 1) + noise * (-1) ** i for i in range(steps)]


def two_rewards(side: list[float], correct: list[float]) -> dict[str, list[float]]:
    steps = len(side)
    return {
        "reward/mean": [a + b for a, b in zip(side, correct, strict=True)],
        "reward/std": [0.2] * steps,
        "reward/correct_frac": correct,
        "reward/exact/mean": correct,
        "reward/exact/abstain_frac": [0.0] * steps,
        "reward/digits/mean": side,
        "reward/digits/abstain_frac": [0.0] * steps,
    }


def test_a_side_reward_that_rises_alone_is_the_finding_and_no_learning(tmp_path: Path) -> None:
    keys = two_rewards(noisy(0.3, 0.9), noisy(0.004, 0.012, noise=0.002))
    keys |= {"eval/accuracy": [0.0, 0.0], "eval/accuracy_low": [0.0, 0.0], "eval/accuracy_high": [0.046, 0.046]}
    state, found = summary(recorded_scores(tmp_path / "run", 40, keys, correct_by="exact"))
    assert state.name == "stalled" and "learned" not in state.text
    assert state.text.startswith("finished after step 40, stalled: right answers 0.006 -> 0.010")
    assert (found[0].rule, found[0].severity) == ("reward_hacking", "problem")
    assert found[0].text == "reward 'digits' rises, but answers do not get better"
    assert [each.rule for each in found if each.metric == "eval/accuracy"] == ["never_right"]


def test_that_no_held_out_answer_is_ever_right_is_a_finding_also_where_nothing_moves(tmp_path: Path) -> None:
    keys = two_rewards(noisy(0.3, 0.3), [0.0] * 40)
    keys |= {"eval/accuracy": [0.0, 0.0], "eval/accuracy_low": [0.0, 0.0], "eval/accuracy_high": [0.046, 0.046]}
    found = summary(recorded_scores(tmp_path / "run", 40, keys, correct_by="exact"))[1]
    assert [(each.rule, each.metric) for each in found] == [("never_right", "eval/accuracy")]
    assert found[0].text == "no held-out answer is ever right"


def test_a_side_reward_that_rises_with_the_right_answers_is_no_finding(tmp_path: Path) -> None:
    state, found = summary(
        recorded_scores(tmp_path / "run", 40, two_rewards(noisy(0.3, 0.9), noisy(0.2, 0.6)), correct_by="exact")
    )
    assert state.name == "finished" and "it learned: right answers 0.297 -> 0.503" in state.text and not found


def test_right_answers_that_were_nearly_all_there_let_a_side_reward_rise(tmp_path: Path) -> None:
    keys = two_rewards(noisy(0.3, 0.9), noisy(0.95, 0.95))
    assert summary(recorded_scores(tmp_path / "run", 40, keys, correct_by="exact"))[1] == []


def test_a_weight_makes_the_side_reward_that_counts(tmp_path: Path) -> None:
    """`digits` gains more, and counts a hundredth."""
    keys = two_rewards(noisy(0.3, 0.9), noisy(0.1, 0.1))
    keys |= {"reward/short/mean": noisy(0.2, 0.4), "reward/short/abstain_frac": [0.0] * 40}
    weights = {"correct_by": "exact", "weights": {"exact": 1.0, "digits": 0.01, "short": 1.0}}
    found = summary(recorded_scores(tmp_path / "run", 40, keys, **weights))[1]
    assert found[0].text.startswith("reward 'short' rises, but answers")


def test_without_a_judge_the_reward_rises_and_nothing_is_learned_or_accurate(tmp_path: Path) -> None:
    keys = {"reward/mean": noisy(3.0, 6.0), "reward/std": [1.0] * 40}
    keys |= {"eval/reward": [3.0, 6.0], "eval/reward_low": [2.8, 5.8], "eval/reward_high": [3.2, 6.2]}
    state = state_line(recorded_scores(tmp_path / "run", 40, keys))
    assert state.name == "finished"
    assert state.text.startswith("finished after step 40, the reward rose: held-out reward 3.000 -> 6.000, reward 3.7")
    assert state.text.endswith("; no reward decides what is right")


def test_a_reward_that_is_lost_in_the_first_update_is_a_collapse_before_what_follows_from_it(tmp_path: Path) -> None:
    """0.5 in step 1, with a spread of 0.5 over 32 prompts (0.088 of noise), and nothing later."""
    steps = 24
    keys = {
        "reward/mean": [0.5] + [0.0] * (steps - 1),
        "reward/std": [0.5] + [0.0] * (steps - 1),
        "completion/truncated_frac": [0.0] + [1.0] * (steps - 1),
        "group/dead_frac": [0.0] + [1.0] * (steps - 1),
        "group/all_wrong_frac": [0.0] + [1.0] * (steps - 1),
        "reward/correct_frac": [0.5] + [0.0] * (steps - 1),
        "optim/lr": [0.03] * steps,
    }
    state, found = summary(recorded_scores(tmp_path / "run", steps, keys, prompts_per_step=32))
    assert state.name == "collapsed" and "reward fell from 0.500 to 0.000" in state.text
    assert [each.rule for each in found] == ["collapse", "truncation"]
    assert found[0].text == "the policy has collapsed within the first steps (lr=0.03)"


def test_a_first_step_that_was_lucky_is_no_collapse(tmp_path: Path) -> None:
    """The same on two prompts: 0.35 of noise."""
    keys = {"reward/mean": [0.5] + [0.0] * 23, "reward/std": [0.5] + [0.0] * 23}
    assert state_line(recorded_scores(tmp_path / "run", 24, keys, prompts_per_step=2)).name == "stalled"


def test_easy_prompts_in_the_first_step_are_no_collapse(tmp_path: Path) -> None:
    """An adapter that did not learn, with lr=1e-6: 0.906 on the first eight prompts, and 0.45 with a spread of 0.15
    between the later steps, of which it is 3 away."""
    keys = {"reward/mean": [0.906, *[0.45 + 0.15 * (-1) ** i for i in range(39)]], "reward/std": [0.29] + [0.48] * 39}
    state, found = summary(recorded_scores(tmp_path / "run", 40, keys, prompts_per_step=8))
    assert (state.name, found) == ("stalled", [])


def test_a_reward_that_falls_where_solved_prompts_retire_is_no_collapse(tmp_path: Path) -> None:
    keys = {"reward/mean": noisy(0.9, 0.1), "reward/std": [0.4] * 40}
    keys |= {"eval/accuracy": [0.2, 0.6], "eval/accuracy_low": [0.1, 0.5], "eval/accuracy_high": [0.3, 0.7]}
    assert state_line(recorded_scores(tmp_path / "run", 40, keys)).name == "finished"
    keys |= {"eval/accuracy": [0.6, 0.1], "eval/accuracy_low": [0.5, 0.0], "eval/accuracy_high": [0.7, 0.2]}
    assert state_line(recorded_scores(tmp_path / "lost", 40, keys)).name == "collapsed"


def test_right_answers_that_are_lost_are_a_collapse_also_where_the_reward_rises(tmp_path: Path) -> None:
    """A reward with the weight -1, so that it pays what is wrong."""
    right = noisy(0.5, 0.02)
    keys = {"reward/mean": [-share for share in right], "reward/correct_frac": right, "reward/std": [0.4] * 40}
    state, found = summary(recorded_scores(tmp_path / "run", 40, keys))
    assert state.name == "collapsed"
    assert state.text.startswith(
        "finished after step 40, collapsed: right answers fell from 0.477 to 0.137; reward -0."
    )
    assert found == []  # what is learned by heart would be right


def test_a_side_reward_that_is_lost_while_more_answers_are_right_is_no_collapse(tmp_path: Path) -> None:
    state, found = summary(
        recorded_scores(tmp_path / "run", 40, two_rewards(noisy(2.0, 0.1), noisy(0.2, 0.6)), correct_by="exact")
    )
    assert (state.name, found) == ("finished", []) and "it learned: right answers 0.297 -> 0.503" in state.text


def test_held_out_prompts_that_are_answered_worse_are_a_finding(tmp_path: Path) -> None:
    """71 and 48 of 128, with Wilson's intervals: 0.089 and 0.080 down and up, so -0.180 +- 0.120 or less."""
    keys = {"reward/mean": noisy(0.45, 0.42, noise=0.1), "reward/std": [0.5] * 40}
    keys |= {
        "eval/accuracy": [0.5547, 0.375],
        "eval/accuracy_low": [0.468, 0.296],
        "eval/accuracy_high": [0.638, 0.461],
    }
    state, found = summary(recorded_scores(tmp_path / "run", 40, keys, entropy_coef=1.0))
    assert state.text.startswith("finished after step 40, stalled: held-out accuracy 0.555 -> 0.375")
    assert [(each.rule, each.severity) for each in found] == [("decline", "problem")]
    assert found[0].remedy == "lower lr, or entropy_coef, which is 1"
    keys |= {"reward/mean": noisy(0.4, 0.9)}
    found = summary(recorded_scores(tmp_path / "by heart", 40, keys))[1]
    assert found[0].evidence == "eval/accuracy 0.555 -> 0.375, reward/mean 0.522 -> 0.778"
    assert found[0].remedy == "use more prompts, fewer steps or a lower lr"


def test_a_collapse_of_a_run_with_old_rollouts_names_their_age(tmp_path: Path) -> None:
    keys = {"reward/mean": [0.5] * 8 + [0.0] * 32, "reward/std": [0.5] * 8 + [0.0] * 32, "optim/lr": [1e-3] * 40}
    keys |= {"sampler/logp_gap_mean": [0.5] * 40}
    found = summary(recorded_scores(tmp_path / "run", 40, keys, max_staleness=8))[1]
    assert [each.rule for each in found] == ["collapse", "stale_sampler"]
    assert found[0].remedy.startswith("lower lr to a tenth, or max_staleness, which is 8; the other findings")


def test_the_noise_of_a_stalled_run_is_what_a_rise_must_exceed(tmp_path: Path) -> None:
    """0.04 between windows whose steps alternate by 0.05: the error is 0.05 sqrt(20/19) sqrt(2/20) = 0.0162, its
    double 0.032, three times it 0.049."""
    rewards = [(-0.152 if i < 20 else -0.112) + 0.05 * (-1) ** i for i in range(40)]
    state = state_line(recorded(tmp_path / "run", rewards))
    assert state.text == "finished after step 40, stalled: reward -0.152 -> -0.112 (noise 0.049)"


def test_a_side_reward_that_a_collapsed_policy_finds_again_is_not_exploited(tmp_path: Path) -> None:
    """lr=0.01: 0.5 + 0.2 in step 1, next to nothing up to step 20, and then the 0.2 of the side reward again."""
    right, side = [0.5] + [0.0] * 39, [0.2] + [0.03] * 19 + [0.2] * 20
    keys = two_rewards(side, right) | {"optim/lr": [0.01] * 40}
    keys |= {"eval/accuracy": [0.55, 0.0], "eval/accuracy_low": [0.47, 0.0], "eval/accuracy_high": [0.64, 0.03]}
    state, found = summary(recorded_scores(tmp_path / "run", 40, keys, correct_by="exact", prompts_per_step=8))
    assert state.name == "collapsed"
    assert [each.rule for each in found] == ["collapse"]
    assert found[0].text == "the policy has collapsed within the first steps (lr=0.01)"


def test_prompts_that_are_too_hard_in_a_first_step_of_little_entropy_do_not_blame_the_temperature(
    tmp_path: Path,
) -> None:
    """Answers of other rows: 1.7 % earn something by chance, and the first eight prompts have 0.038 nats."""
    keys = {
        "reward/mean": noisy(0.008, 0.017, noise=0.005),
        "reward/std": [0.1] * 40,
        "reward/correct_frac": noisy(0.008, 0.017, noise=0.005),
        "group/dead_frac": [0.99] * 40,
        "group/all_wrong_frac": [0.98] * 40,
        "rollout/entropy": [0.038] + [0.14] * 39,
    }
    found = summary(recorded_scores(tmp_path / "run", 40, keys, temperature=1.0))[1]
    assert [each.rule for each in found] == ["too_hard"]
    assert found[0].remedy.startswith(
        "read completions that earn nothing: if some are right, fix the reward or the answers"
    )


def test_a_policy_without_entropy_in_its_first_step_explores_too_little(tmp_path: Path) -> None:
    keys = {
        "reward/mean": [0.3] * 20,
        "reward/std": [0.45] * 20,
        "group/dead_frac": [0.97] * 20,
        "group/all_wrong_frac": [0.68] * 20,
        "group/all_right_frac": [0.29] * 20,
        "reward/correct_frac": [0.3] * 20,
        "rollout/entropy": [0.004] * 20,
    }
    found = summary(recorded_scores(tmp_path / "run", 20, keys, temperature=0.02))[1]
    assert [each.rule for each in found] == ["no_exploration"]
    assert found[0].remedy == "raise temperature, which is 0.02: 1 is usual"
    keys["rollout/entropy"] = [0.4] * 20
    found = summary(recorded_scores(tmp_path / "hard", 20, keys, temperature=1.0))[1]
    assert [each.rule for each in found] == ["too_hard"]


def test_a_run_that_failed_or_was_killed_has_that_as_its_first_finding(tmp_path: Path) -> None:
    failed = summary(recorded(tmp_path / "failed", RISING[:3], "failed"))[1]
    assert [(each.rule, each.severity) for each in failed] == [("failed", "problem")]
    assert failed[0].evidence == "after step 3: ValueError: \\x1b[31mno" and "gruppo resume" in failed[0].remedy
    killed = summary(recorded(tmp_path / "killed", RISING[:3], "running"))[1]
    assert [(each.rule, each.severity) for each in killed] == [("killed", "warning")]


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
    assert state.text.startswith("without a readable status file, after step 1: too early to tell")


def test_the_sentence_has_the_numbers(tmp_path: Path) -> None:
    """By hand: means of the first and last 20 of 0.20, 0.21, ... 0.59; the noise cancels within four steps."""
    state = state_line(recorded(tmp_path / "run", RISING))
    assert state.text.startswith("finished after step 40, the reward rose: reward 0.295 -> 0.495 (noise 0.0")


def test_a_rise_with_a_problem_is_told_with_it(tmp_path: Path) -> None:
    state, found = summary(recorded(tmp_path / "run", RISING, **{"completion/truncated_frac": 0.9}))
    assert [each.rule for each in found] == ["truncation"]
    assert state.name == "finished" and "; but most completions are cut off before they end" in state.text


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

    from gruppo.doctor import completion_rules, metric_rules, state

    root = Path(__file__).parents[3]
    source = "".join(Path(m.__file__).read_text(encoding="utf-8") for m in (metric_rules, completion_rules, state))
    names = set(re.findall(r'rule="(\w+)"', source)) | {rule for rule, _ in metric_rules.RANGES.values()}
    names |= set(re.findall(r'_dead\(\s*"(\w+)"', source))
    page = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.split("| finding |")[1].split("\n\n")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert listed == names and len(names) > 15
