"""The verbs on the embedded model: what they print can be checked against the library."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

from gruppo.cli.main import main, run
from gruppo.errors import InputError
from gruppo.task.builtin import builtin_model_path


def test_sample_prints_each_completion_with_its_log_prob(capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.sampler import SamplingParams, TorchSampler

    assert run(["sample", "12+34=", "47+85=", "--num-samples", "2", "--max-new-tokens", "4", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    from gruppo.task import load_prompts

    sampler = TorchSampler("builtin")
    prompts = load_prompts([{"prompt": "12+34="}, {"prompt": "47+85="}], sampler.tokenizer).prompts
    responses = sampler.sample(prompts, 2, SamplingParams(max_new_tokens=4, seed=3))
    expected = [
        f"{p.text} -> {s.text}   log-prob {sum(s.logps):.2f}, {len(s.tokens)} tokens, {s.stop_reason}"
        for p, r in zip(prompts, responses, strict=True)
        for s in r.sequences
    ]
    assert lines == expected


def test_greedy_sampling_knows_the_sums_without_carries(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sample", "12+34=", "--temperature", "0"]) == 0
    assert " -> 046 " in capsys.readouterr().out


def test_sample_without_a_prompt_says_what_it_needs() -> None:
    from gruppo.errors import InputError

    with pytest.raises(InputError, match="sample needs at least one prompt"):
        run(["sample"])


def test_a_run_given_to_sample_as_a_prompt_is_refused_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--steps 1 --prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-prompts 0 --no-tensorboard"
    run(["train", *words.split(), "--output", str(tmp_path / "run")])
    from gruppo.errors import InputError

    with pytest.raises(InputError) as caught:
        run(["sample", str(tmp_path / "run"), "47+85="])
    assert str(caught.value).endswith(f"is a run directory, not a prompt; give it as --run {tmp_path / 'run'}")
    capsys.readouterr()
    assert run(["sample", "47+85=", *str(caught.value).split("give it as ")[1].split()]) == 0
    assert capsys.readouterr().out.startswith("47+85= -> ")


def test_a_completion_is_one_line_however_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["sample", "12+34=", "--max-new-tokens", "50"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) > 40


def test_an_episode_prints_its_turns() -> None:
    from gruppo.cli.models import episode_numbers, sample_lines
    from gruppo.types import Prompt, Trajectory

    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 6}}}
    talk: Any = (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7\x1b[2J", "name": "add"},
        {"role": "assistant", "content": "7"},
    )
    facts: dict[str, Any] = {"sampled": (True, False, True), "logps": (-0.5, -0.25), "text": "7"}
    made = Trajectory(prompt=Prompt(token_ids=(1,), text="1+6="), tokens=(3, 4, 5), messages=talk, **facts)
    assert sample_lines(made).plain.splitlines() == [
        "1+6= ->",
        "   1  add(a=1, b=6)",
        "      add: 7\\x1b[2J",
        "   2  7",
        "  2 turns, 1 call; the model ended it",
        "   log-prob -0.75, 2 tokens of the policy",
    ]
    cut = replace(made, messages=talk[:1], stop_reason="turns")
    assert episode_numbers([made, cut]) == "greedy episodes: 1.5 turns and 1.0 calls on average; of 2, 1 cut and 0 lost"
    assert episode_numbers([replace(made, messages=None)]) == ""


def test_eval_as_json_is_the_librarys_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gruppo.task.builtin import greedy_accuracy
    from gruppo.task.carries import carries_rows

    assert run(["eval", "--json", "--limit", "64", "--num-samples", "4", "--max-new-tokens", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    # The split is sorted, and sums of small numbers are easier: 0.625 of the first 64 are right.
    random = np.random.PCG64(np.random.SeedSequence(0, spawn_key=(3,))).random_raw(512)
    rows = [carries_rows("heldout")[i] for i in sorted(np.argsort(random, kind="stable")[:64])]
    assert found["eval/accuracy"] == greedy_accuracy(model, tokenizer, rows)
    assert found["prompts"] == 64
    assert found["eval/pass@1"] < found["eval/pass@2"] < found["eval/pass@4"]
    assert set(found) == {"prompts"} | {
        f"eval/{k}{end}" for k in ("accuracy", "reward", "pass@1", "pass@2", "pass@4") for end in ("", "_low", "_high")
    }


def test_eval_as_a_table_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    run(["eval", "--json", "--limit", "32", "--max-new-tokens", "4"])
    found = json.loads(capsys.readouterr().out)
    assert run(["eval", "--limit", "32", "--max-new-tokens", "4"]) == 0
    low, high = found["eval/accuracy_low"], found["eval/accuracy_high"]
    line = f"eval/accuracy   {found['eval/accuracy']:.4f}   95 % interval {low:.4f} to {high:.4f}"
    assert line in capsys.readouterr().out.splitlines()


def test_export_copies_a_model_that_evaluates_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(builtin_model_path()), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'} holds the model\n"
    results = []
    for model in ("builtin", str(tmp_path / "out")):
        run(["eval", "--json", "--limit", "32", "--max-new-tokens", "4", "--model", model])
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]


@pytest.mark.slow
def test_train_writes_the_run_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--steps 2 --prompts-per-step 4 --group-size 4 --max-new-tokens 4 --eval-prompts 8 --no-tensorboard --threads 1"
    )
    assert run(["train", *words.split(), "--output", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "4 prompts x 4 completions = 16 sequences per step" in out
    assert "step 1/2" in out and "step 2/2" in out
    assert f"done: {tmp_path}/run/model holds the model, {tmp_path}/run the run" in out
    assert out.index(f"watch: gruppo view {tmp_path}/run\n") < out.index("step 1/2")
    report = f"{tmp_path}/run/report.html"
    assert out.splitlines()[-1] == f"report: gruppo report {tmp_path}/run (writes {report})"
    assert run(["report", f"{tmp_path}/run"]) == 0
    assert capsys.readouterr().out == f"report: file://{report}\n" and Path(report).is_file()
    assert run(["resume", f"{tmp_path}/run"]) == 0
    out = capsys.readouterr().out
    assert "the run is done: it has taken all of its 2 steps" in out
    assert "watch:" not in out  # there is nothing to watch


def test_a_path_that_looks_like_markup_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--steps 1 --prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-prompts 0 --no-tensorboard --threads 1"
    )
    output = tmp_path / "[red]" / "x[" / "red] :smile:"
    assert run(["train", *words.split(), "--output", str(output)]) == 0
    assert f"done: {output}/model" in capsys.readouterr().out


def test_data_check_and_reward_check_are_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    assert run(["data", "check", str(path)]) == 0
    assert "rows: 2" in capsys.readouterr().out
    assert run(["reward", "check", "exact_match", "--data", str(path), "--answer-column", "answer"]) == 0
    assert "exact_match on 2 rows" in capsys.readouterr().out


# --- errors become exit codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("InputError", 2),
        ("MissingExtraError", 2),
        ("NumericError", 3),
        ("RewardError", 4),
        ("SamplerError", 5),
        ("CheckpointError", 6),
    ],
)
def test_each_error_has_its_exit_code(
    error: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gruppo.errors
    from gruppo.cli import main as module

    def fail(arguments: Any) -> int:
        raise getattr(gruppo.errors, error)("what went wrong")

    monkeypatch.setattr(module, "run", fail)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == code
    assert capsys.readouterr().err == "gruppo: what went wrong\n"


def test_ctrl_c_outside_of_a_run_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.cli import main as module

    def interrupt(arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["eval"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_text_that_the_terminal_cannot_encode_does_not_end_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    from gruppo.cli import main as module

    monkeypatch.setattr(module, "run", lambda arguments: print("held-out █▅ “½”") or 0)
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert ended.value.code == 0
    assert raw.getvalue() == rb"held-out \u2588\u2585 \u201c\xbd\u201d" + os.linesep.encode()


def test_options_of_a_run_are_not_flags_of_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        run(["resume", str(tmp_path), "--lr", "1e-5", "--group-size=4", "--steps", "9"])
    said = str(refused.value)
    assert said.startswith("--group-size, --lr cannot be given to `gruppo resume`")
    assert "only --steps changes" in said and "config.yaml" in said and "--accept-changes" in said


def test_wrong_names_of_loss_advantage_and_rewards_are_one_error(tmp_path: Path) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "run"
    names = "loss: grop\nadvantage: gropu\nrewards: [exact_mach, think_fromat]\n"
    config.write_text(f"{names}data: builtin:carries\noutput: {output}\n")
    with pytest.raises(InputError) as refused:
        run(["train", "--config", str(config)])
    lines = str(refused.value).splitlines()
    assert len(lines) == 4
    for line, name in zip(lines, ("grop", "gropu", "exact_mach", "think_fromat"), strict=True):
        assert f"{name!r}" in line
    assert not output.exists()


# --- output and places that fail ------------------------------------------------------------------------------------


def in_process(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A shell's command in a process of its own, with `gruppo` as it is here."""
    words = f"{sys.executable} -m gruppo"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shell = ["sh", "-c", command.replace("gruppo", words, 1)]
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["losses", "--help", "train --help", "sample 1+1= --max-new-tokens 2"])
def test_an_output_that_is_full_is_one_line_and_exit_code_2(words: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = run_python(
            ["-m", "gruppo", *words.split()], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("gruppo: standard output cannot be written: No space left on device")
    assert ended.stderr.count("\n") == 1


def test_an_unknown_verb_is_exit_code_2_where_errors_cannot_be_written(tmp_path: Path) -> None:
    assert in_process("gruppo nosuch 2>/dev/full", tmp_path).returncode == 2


def test_doctor_refuses_a_working_directory_that_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    ended = in_process("rmdir ../gone; gruppo doctor", tmp_path / "gone")
    assert ended.returncode == 2
    assert ended.stderr == "gruppo: the working directory is deleted; change into another and start again\n"


@pytest.mark.slow
def test_a_demo_without_held_out_prompts_ends_with_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--steps 1 --prompts-per-step 2 --group-size 2 --eval-prompts 0 --no-tensorboard"
    assert run(["demo", *words.split(), "--output", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert f"report: {(tmp_path / 'run' / 'report.html').as_uri()}" in out and "held-out accuracy" not in out


@pytest.mark.parametrize("name", ["self", "completions"])
def test_data_check_refuses_a_column_that_training_would(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2", name: "x"}) + "\n")
    assert run(["data", "check", str(tmp_path / "rows.jsonl")]) == 2
    assert f"rewards receive something else under the name '{name}'; rename the column" in capsys.readouterr().out


@pytest.mark.slow
def test_the_calculator_demo_calls_its_tool_and_shows_turns_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--task calculator --steps 1 --prompts-per-step 2 --eval-prompts 2 --no-tensorboard"
    assert run(["demo", *words.split(), "--output", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "│ 80*83= │ 8083 (1 turn) │ 8083 (1 turn) │ 6640 " in shown
    assert f"gruppo sample --run {tmp_path / 'run'} '37*48='" in shown


def test_the_demos_of_a_language_model_and_of_the_calculator_are_two() -> None:
    with pytest.raises(InputError, match="--llm and --task calculator are two demos"):
        run(["demo", "--llm", "--task", "calculator"])
