"""What a report holds, against numbers worked out by hand and files read plainly."""

import base64
import gzip
import hashlib
import json
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from written_runs import metrics_of, rollout, run_directory, write_large_run

from gruppo.report.charts import charts
from gruppo.report.data import Limits, TokenTexts, chosen_steps, config_table, ledger, metric_series, step_data
from gruppo.report.page import ledger_data, report_page
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader
from gruppo.types import Group, Prompt, Rollout, Trajectory

PROMPT = Prompt(token_ids=(3,), text="1+1=", index=0)


@dataclass(frozen=True)
class Found:
    rule: str = "kl"
    severity: str = "problem"
    step: int | None = 3
    text: str = "the policy runs away"
    evidence: str = "KL is 9"
    remedy: str = "lower lr"
    metric: str | None = "live/approx_kl"


@dataclass(frozen=True)
class Stands:
    name: str = "collapsed"
    text: str = "all rewards are 0 since step 3"


def made_run(path: Path, steps: int = 5) -> RunDirectory:
    draw = random.Random(0)
    with run_directory(path, steps) as run:
        for step in range(1, steps + 1):
            run.log_metrics(step, metrics_of(step, draw))
        run.set_status("done", steps)
    return run


def test_the_ledger_counts_each_token_once(tmp_path: Path) -> None:
    def told(tokens: int, **facts: object) -> Rollout:
        sampled = facts.pop("sampled", None)
        made = Trajectory(prompt=PROMPT, tokens=(5,) * tokens, sampled=sampled)  # pyright: ignore[reportArgumentType]
        return Rollout(trajectory=made, **facts)  # pyright: ignore[reportArgumentType]

    run = made_run(tmp_path / "run")
    kept = (
        told(10, advantage=1.0, rejected=(True,) * 3 + (False,) * 7),
        told(6, advantage=-1.0, sampled=(True, True, False, False, False, True)),
        told(7, advantage=0.0),
        told(5, advantage=1.0, is_masked=True),
    )
    run.write_completions(2, [Group(prompt=PROMPT, rollouts=kept)])
    run.write_completions(4, [Group(prompt=PROMPT, rollouts=(told(9), told(2)), status="no_signal")])
    found = ledger(run, [2, 4])
    counts = {"": 10, "other": 3, "left_out": 11, "masked": 5, "no_advantage": 0, "at_mean": 7, "rejected": 3}
    assert found["total"] == counts
    assert (found["sequences"], found["scored"]) == (4, 20)  # 10 + 3 + 7: the masked and the left out are not scored
    shown = ledger_data(run)
    assert shown is not None
    assert shown["generated"] == 39 == shown["trained"] + sum(line["count"] for line in shown["lines"])
    assert shown["divisor"][0] == "The loss is a mean over all tokens of the step."
    assert "2 completions with 10 scored tokens" in shown["divisor"][1]  # per recorded step


def test_the_scored_tokens_of_the_ledger_are_those_that_the_loss_divides_by(tmp_path: Path) -> None:
    from gruppo.batch.packed import Totals

    draw = random.Random(4)
    rollouts = [
        rollout(PROMPT, draw, n, advantage=a, is_masked=m)
        for n, a, m in ((5, 1.0, False), (4, 0.0, False), (3, 1.0, True))
    ]
    run = made_run(tmp_path / "run")
    run.write_completions(1, [Group(prompt=PROMPT, rollouts=tuple(rollouts))])
    totals, found = Totals.of_step(rollouts), ledger(run, [1])
    assert (found["sequences"], found["scored"]) == (totals.sequences, totals.tokens) == (3, 9)


def test_the_ledger_divides_by_the_numbers_of_an_update(tmp_path: Path) -> None:
    draw = random.Random(4)
    run = made_run(tmp_path / "run")
    config = run.path / "config.yaml"
    config.write_text(config.read_text() + "minibatches: 2\nepochs_per_batch: 3\n")
    groups = [Group(prompt=PROMPT, rollouts=tuple(rollout(PROMPT, draw, 5) for _ in range(4))) for _ in range(4)]
    run.write_completions(1, groups)
    shown = ledger_data(run)
    assert shown is not None
    # Two of the four groups in each update: 8 completions of 5 tokens.
    assert "6 updates" in shown["divisor"][1] and "8 completions with 40 scored tokens" in shown["divisor"][1]


def test_the_ledger_names_the_share_of_completions_that_were_recorded(tmp_path: Path) -> None:
    draw = random.Random(4)
    run = made_run(tmp_path / "run")
    groups = [Group(prompt=PROMPT, rollouts=tuple(rollout(PROMPT, draw, 5) for _ in range(4))) for _ in range(4)]
    run.write_completions(1, groups, limit=8)
    shown = ledger_data(run)
    assert shown is not None
    assert "8 of 16 completions" in shown["note"] and "completions_limit" in shown["note"]
    assert "completions_limit" in shown["divisor"][1]
    run.write_completions(1, groups)
    shown = ledger_data(run)
    assert shown is not None and "completions_limit" not in shown["note"] + shown["divisor"][1]


def test_the_ledger_tells_groups_without_an_advantage_from_completions_at_the_mean(tmp_path: Path) -> None:
    draw = random.Random(4)
    run = made_run(tmp_path / "run")
    equal = tuple(rollout(PROMPT, draw, 3, advantage=0.0, reward=1.0) for _ in range(3))
    mixed = tuple(rollout(PROMPT, draw, 5, advantage=a, reward=a) for a in (-1.0, 0.0, 1.0))
    by_token = tuple(rollout(PROMPT, draw, 4, advantage=a, reward=0.0) for a in ((0.0, 0.0, 1.0, 0.0), (0.0,) * 4))
    masked = (rollout(PROMPT, draw, 7, advantage=1.0, is_masked=True), rollout(PROMPT, draw, 7, advantage=0.0))
    groups = [Group(prompt=PROMPT, rollouts=each) for each in (equal, mixed, by_token, masked)]
    run.write_completions(1, groups)
    shown = ledger_data(run)
    assert shown is not None
    counts = {line["title"]: line["count"] for line in shown["lines"]}
    assert counts["in a group without an advantage"] == 3 * 3
    assert counts["at the mean of its group"] == 5 + 3 + 4 + 7  # tokens of 0 beside others that have an advantage
    assert shown["generated"] == 9 + 15 + 8 + 14 == shown["trained"] + sum(counts.values())


def test_the_steps_in_a_page_are_the_ends_the_extremes_and_some_between(tmp_path: Path) -> None:
    with run_directory(tmp_path / "run", 100) as run:
        for step in range(1, 101):
            run.log_metrics(step, {"live/token_kl_max": float(step == 37), "optim/grad_norm": float(step == 61)})
            run.write_completions(
                step, [Group(prompt=PROMPT, rollouts=(Rollout(trajectory=Trajectory(prompt=PROMPT, tokens=(5,))),))]
            )
        run.set_status("done", 100)
    chosen = chosen_steps(run, 10)
    assert len(chosen) == 10 and {1, 37, 61, 100} <= set(chosen)
    assert max(b - a for a, b in pairwise(chosen)) <= 40
    assert chosen_steps(run, 100) == list(range(1, 101))


def test_limits_keep_whole_groups_and_count_what_is_left_out(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "run", steps=1, groups=8, group_size=4, length=50)
    data = step_data(run, 1, TokenTexts(run), Limits(tokens=650))
    assert len(data["groups"]) == 3 and data["left_out"] == 20  # three of 200 tokens fit
    moved = {row["prompt_index"]: 0.0 for row in run.completions(1).to_pylist()}
    for row in run.completions(1).to_pylist():
        pairs = zip(row["policy_logps"], row["old_logps"], strict=True)
        moved[row["prompt_index"]] = max(moved[row["prompt_index"]], *(abs(a - b) for a, b in pairs))
    assert max(moved, key=lambda index: moved[index]) in {group["index"] for group in data["groups"]}
    whole = step_data(run, 1, TokenTexts(run))
    assert len(whole["groups"]) == 8 and whole["left_out"] == 0


def test_a_long_curve_keeps_its_ends_and_its_peaks(tmp_path: Path) -> None:
    with run_directory(tmp_path / "run", 5000) as run:
        for step in range(1, 5001):
            run.log_metrics(step, {"optim/grad_norm": 100.0 if step == 3333 else 1.0 + (step % 7) / 10})
        run.set_status("done", 5000)
    (chart,) = (c for question in charts([run]) for c in question["charts"] if c["title"] == "norm of the gradient")
    rows = chart["spec"]["datasets"]["rows"]
    assert len(rows) <= 402 and {1, 3333, 5000} <= {row["step"] for row in rows}
    at_peak = next(row for row in rows if row["step"] == 3333)
    # 125 steps on either side: 250 values of 1.0 to 1.6, and the peak.
    around = [1.0 + (step % 7) / 10 for step in range(3333 - 125, 3333 + 126) if step != 3333]
    assert at_peak["mean"] == pytest.approx((sum(around) + 100) / 251, rel=1e-4)


def test_every_number_of_a_run_is_in_a_chart_or_always_zero(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    run.log_metrics(
        6,
        {
            "optim/skipped": 0.0,
            "my/own": 3.0,
            "eval/accuracy": 0.5,
            "eval/accuracy_low": 0.4,
            "eval/accuracy_high": 0.6,
        },
    )
    found = charts([run])
    shown = {key["key"] for q in found for c in q["charts"] + q["further"] for key in c["keys"]} | {
        k for q in found for k in q["zero"]
    }
    assert shown | {"eval/accuracy_low", "eval/accuracy_high"} >= set(metric_series(run))
    interval = next(c for c in found[0]["charts"] if c["title"] == "held-out accuracy")["spec"]["datasets"]["rows"]
    assert (interval[0]["low"], interval[0]["value"], interval[0]["high"]) == (0.4, 0.5, 0.6)


def test_usual_ranges_and_findings_are_marks_in_the_chart(tmp_path: Path) -> None:
    found = charts([made_run(tmp_path / "run")], [[Found()]])
    chart = next(c for c in found[2]["charts"] if c["keys"][0]["key"] == "live/approx_kl")
    assert chart["bounds"] is None or chart["bounds"][1] <= 0.01  # the registry: 0 to 0.01
    text = json.dumps(chart["spec"])
    assert '"style": "finding"' in text and "the policy runs away" in text
    dead = next(c for c in found[1]["charts"] if "group/dead_frac" in c["keys"][0]["key"])
    assert dead["bounds"] == pytest.approx((0.0, 0.8))


def test_options_that_differ_come_first(tmp_path: Path) -> None:
    first, second = made_run(tmp_path / "a"), made_run(tmp_path / "b", steps=9)
    table = config_table([first, second])
    assert [row["name"] for row in table if row["differs"]] == ["steps"]
    assert table[0] == {"name": "steps", "values": ["5", "9"], "differs": True}


def blocks(page: str) -> dict[str, str]:
    """The data blocks of a page by their ids."""
    return dict(re.findall(r'<script id="([\w-]+)" type="[\w/]+">(.*?)</script>', page, re.S))


def test_the_policy_of_the_page_names_what_is_in_it(tmp_path: Path) -> None:
    page = report_page([made_run(tmp_path / "run")])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "unsafe" not in policy[1] and policy[1].startswith("default-src 'none'")
    named = set(re.findall(r"'sha256-([^']+)'", policy[1]))
    inline = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.S)
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline} == named
    assert len(inline) == 3
    outside = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S)
    assert not re.search(r"<[^>]+(?:src|href)=[\"'](?!data:|#)", outside)


def test_findings_and_the_state_reach_the_page(tmp_path: Path) -> None:
    page = report_page([made_run(tmp_path / "run")], findings=[[Found()]], states=[Stands()])
    (shown,) = json.loads(blocks(page)["data"])["runs"]
    assert shown["state"] == {"name": "collapsed", "text": "all rewards are 0 since step 3"}
    assert shown["findings"][0]["remedy"] == "lower lr" and shown["findings"][0]["step"] == 3


def test_the_completions_in_a_page_are_those_of_the_files(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "run", steps=2, groups=2, group_size=2, length=5)
    data = json.loads(gzip.decompress(base64.b64decode(blocks(report_page([run]))["step-0-2"])))
    rows = run.completions(2).to_pylist()
    made = [r for group in data["groups"] for r in group["rollouts"]]
    assert [r["ids"] for r in made] == [row["tokens"] for row in rows]
    for r, row in zip(made, rows, strict=True):
        assert r["new"] == pytest.approx(row["policy_logps"], abs=5e-7)
        assert (r["reward"], r["correct"], r["parts"]) == (
            row["reward"],
            row["correct"],
            {"exact_match": row["reward"]},
        )


def test_numbers_of_tokens_keep_the_digits_of_float32(tmp_path: Path) -> None:
    exact = (-2.3364952e-05, -1.2345678e-10, -0.69314718, -12.345678, 0.0, -3.0e-30)
    drawn = Rollout(
        trajectory=Trajectory(prompt=PROMPT, tokens=(5,) * 6, logps=exact),
        reward=1.2345678e-7,
        advantage=-2.3364952e-05,
        old_logps=exact,
    )
    run = made_run(tmp_path / "run")
    run.write_completions(1, [Group(prompt=PROMPT, rollouts=(drawn,))])
    (made,) = step_data(run, 1, TokenTexts(run))["groups"][0]["rollouts"]
    for name in ("sampler", "old"):
        assert made[name] == pytest.approx(exact, rel=1e-6, abs=0)
        assert max(len(repr(x)) for x in made[name]) <= len("-2.336495e-05")  # no more than is needed
    assert made["sampler"][0] == -2.336495e-05
    assert (made["reward"], made["advantage"]) == (1.234568e-07, -2.336495e-05)


def test_numbers_that_json_lacks_are_null_in_the_page(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    odd = Rollout(
        trajectory=Trajectory(prompt=PROMPT, tokens=(5, 6)),
        reward=float("nan"),
        advantage=float("inf"),
        old_logps=(float("-inf"), -1.0),
        extras={"x": float("nan")},
    )
    run.write_completions(1, [Group(prompt=PROMPT, rollouts=(odd,))])
    data = gzip.decompress(base64.b64decode(blocks(report_page([run]))["step-0-1"]))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (made,) = json.loads(data, parse_constant=refuse)["groups"][0]["rollouts"]
    assert (made["reward"], made["advantage"], made["old"]) == (None, None, [None, -1.0])


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    with run_directory(tmp_path / "run", 3) as run:
        pass
    assert "<!doctype html>" in report_page([RunReader(run.path)])


def cut_file(run: RunDirectory, step: int) -> None:
    with run.completions_file(step).open("r+b") as file:
        file.truncate(2000)


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "run", steps=3, groups=2, group_size=2, length=50)
    cut_file(run, 2)
    found = blocks(report_page([run]))
    assert sorted(name for name in found if name.startswith("step-")) == ["step-0-1", "step-0-3"]
    data = json.loads(found["data"])
    assert data["runs"][0]["steps_here"] == [1, 3]
    assert "2 of 3 recorded steps" in data["note"]
    for text in (data["note"], data["runs"][0]["ledger"]["note"]):
        assert "step-000002.parquet cannot be read and is left out" in text
    assert data["runs"][0]["ledger"]["generated"] == 2 * 4 * 50


def test_a_run_of_which_no_file_can_be_read_has_a_page_that_names_them(tmp_path: Path) -> None:
    run = write_large_run(tmp_path / "run", steps=2, groups=2, group_size=2, length=50)
    for step in (1, 2):
        cut_file(run, step)
    data = json.loads(blocks(report_page([run]))["data"])
    shown = ledger_data(run)
    assert shown is not None and shown["generated"] == 0
    for text in (data["note"], shown["note"]):
        assert "step-000001.parquet, step-000002.parquet cannot be read and are left out" in text
