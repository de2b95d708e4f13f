"""`gruppo eval RUN` and `gruppo sample --run RUN`: a run is scored and tried as it was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gruppo.cli.main import run
from gruppo.errors import InputError
from gruppo.task.builtin import builtin_model_path, builtin_tokenizer
from gruppo.task.carries import carries_rows
from gruppo.trainer import GRPOTrainer, TrainConfig

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
OPTIONS: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 4,
    "steps": 2,
    "lr": 1e-3,
    "eval_prompts": 24,
    "seed": 5,
    "completions_every": 0,
    "tensorboard": False,
    "threads": 1,
}


def save_model(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names or [file.name for file in builtin_model_path().iterdir() if file.is_file()]:
        shutil.copy(builtin_model_path() / name, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with columns of other names, text through a chat template and a system message; and its last metrics."""
    folder = tmp_path_factory.mktemp("eval")
    rows = [{"problem": row["prompt"], "gold": row["answer"]} for row in carries_rows("train")[::80]]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_model(folder / "base")
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    columns: dict[str, Any] = {"prompt_column": "problem", "answer_column": "gold"}
    config = TrainConfig(
        **OPTIONS, **columns, model=str(model), data=str(folder / "sums.jsonl"), chat=True, system="=",
        output=str(folder / "run"),
    )  # fmt: skip
    result = GRPOTrainer(config, quiet=True).train()
    return folder / "run", result.metrics[-1]


def evaluated(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert run(["eval", "--json", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def test_eval_of_a_run_gives_the_score_that_the_run_ended_with(
    trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, last = trained
    found = evaluated(capsys, path)
    assert found.pop("prompts") == 24
    assert found == {name: value for name, value in last.items() if name.startswith("eval/")}
    table = pq.read_table(path / "eval.parquet").to_pylist()
    held_out = [json.loads(line) for line in (path / "heldout.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in table] == [f"<bos>={row['prompt']}" for row in held_out]
    assert [row["correct"] for row in table] == [
        row["completion"] == json.loads(row["columns"])["answer"] for row in table
    ]
    assert sum(row["correct"] for row in table) / 24 == found["eval/accuracy"]


def test_what_is_given_wins_over_the_run(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    output = tmp_path / "new" / "all.parquet"
    assert run(["eval", str(path), "--limit", "6", "--num-samples", "2", "--seed", "1", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"6 of 24 prompts of {path / 'heldout.jsonl'}, chosen with seed 1"
    assert lines[1] == "text prompts go through the chat template"
    assert lines[2] == "rewards exact_match; an answer is right where exact_match is at least 1"
    assert lines[-1] == f"completions: {output}"
    table = pq.read_table(output).to_pylist()
    assert [row["sample"] for row in table] == [0, 1, 2] * 6  # the greedy one, then the sampled ones
    assert len({row["prompt_index"] for row in table}) == 6
    right = [sum(row["correct"] for row in table[i + 1 : i + 3]) / 2 for i in range(0, 18, 3)]
    assert f"eval/pass@1     {sum(right) / 6:.4f} " in lines[-3]


def test_the_rewards_that_are_used_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--limit", "2", "--max-new-tokens", "4"]
    assert run(words) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("rewards exact_match; an answer is right where")
    assert run([*words, "--rewards", "number_match", "exact_match", "--correct-by", "exact_match"]) == 0
    shown = "rewards number_match, exact_match; an answer is right where exact_match is at least 1"
    assert capsys.readouterr().out.splitlines()[1] == shown


def test_other_data_is_read_with_the_columns_of_the_run(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    found = evaluated(capsys, path, "--data", path.parent / "sums.jsonl", "--limit", 8)
    assert found["prompts"] == 8
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "01+01=", "answer": "002"}\n')
    with pytest.raises(InputError, match="has no column 'gold'; it has 'prompt', 'answer'"):
        run(["eval", str(path), "--data", str(other)])
    assert evaluated(capsys, path, "--data", other, "--prompt-column", "prompt", "--answer-column", "answer")


def test_a_run_directory_stands_for_its_model(
    trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    words = ("--limit", 32, "--max-new-tokens", 4)
    assert evaluated(capsys, "--model", path, *words) == evaluated(capsys, "--model", path / "model", *words)


def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    config = TrainConfig(**OPTIONS | {"eval_prompts": 0}, output=str(tmp_path / "run"))
    GRPOTrainer(config, quiet=True).close()
    with pytest.raises(
        InputError, match=f"run {tmp_path}/run has no model yet.*`gruppo resume {tmp_path}/run` goes on"
    ):
        run(["sample", "--model", str(tmp_path / "run"), "1+1="])
    with pytest.raises(InputError, match=r"has no held-out rows \(heldout\.jsonl\); give --data"):
        run(["eval", str(tmp_path / "run")])


def test_a_model_folder_without_tokenizer_is_what_is_blamed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "bare", "config.json", "model.safetensors")
    with pytest.raises(
        InputError, match=f"model folder {folder} has no tokenizer .*; copy the files from the model that"
    ):
        run(["eval", "--model", str(folder)])


def test_rewards_that_were_objects_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ends_in_two(completions: list[str], **columns: Any) -> list[float]:
        return [float(text.endswith("2")) for text in completions]

    output = tmp_path / "run"
    rows = [{"prompt": f"{i:02}+02=", "answer": f"{i + 2:03}"} for i in range(40)]
    config = TrainConfig(**OPTIONS | {"steps": 1}, output=str(output))
    GRPOTrainer(config, rewards=[ends_in_two], data=rows, quiet=True).train()
    with pytest.raises(InputError, match=r"were Python objects.*object:ends_in_two; name rewards: --rewards"):
        run(["eval", str(output)])
    assert evaluated(capsys, output, "--rewards", "exact_match")["prompts"] == 24


def test_accuracy_is_that_of_one_reward_whatever_the_others_give(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--limit", 64, "--max-new-tokens", 4)
    alone = evaluated(capsys, *words)
    both = evaluated(capsys, *words, "--rewards", "exact_match", "tests_cli_generous:three")
    assert both["eval/accuracy"] == alone["eval/accuracy"] < 1
    assert both["eval/reward"] == pytest.approx(alone["eval/reward"] + 3)
    named = evaluated(capsys, *words, "--rewards", "exact_match", "tests_cli_generous:three", "--correct-by", "three")
    assert named["eval/accuracy"] == 1


def test_without_a_reward_that_decides_there_is_a_held_out_reward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--limit", 8, "--max-new-tokens", 4, "--rewards", "tests_cli_generous:three")
    found = evaluated(capsys, *words)
    assert found["eval/reward"] == 3 and not [name for name in found if "accuracy" in name or "pass" in name]
    assert run(["eval", *map(str, words)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "eval/reward 3.0000 95 % interval" in shown and "accuracy" not in shown
    assert "rewards three; no reward decides which answers are right (correct_by names one)" in shown


@pytest.fixture(autouse=True)
def generous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests_cli_generous.py").write_text(
        "def three(completions, **columns):\n    return [3.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_the_model_computes_in_the_format_that_is_named(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([builtin_tokenizer()("47+85=")["input_ids"]])
    first = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=getattr(torch, dtype))
        logps = model(ids).logits[0, -1].float().log_softmax(-1)
        file = tmp_path / f"{dtype}.parquet"
        run(["sample", "47+85=", "--temperature", "0", "--dtype", dtype, "--output", str(file)])
        [row] = pq.read_table(file).to_pylist()
        first[dtype] = row["logps"][0]
        assert first[dtype] == pytest.approx(logps.max().item(), abs=1e-6)
    assert first["float32"] != first["bfloat16"]


def test_sample_of_a_run_uses_its_template_and_limits(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = trained
    output = tmp_path / "samples.parquet"
    assert run(["sample", "01+02=", "--run", str(path), "--num-samples", "2", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines] == ["<bos>=01+02="] * 2
    table = pq.read_table(output).to_pylist()
    assert [(row["prompt"], row["sample"]) for row in table] == [("<bos>=01+02=", 0), ("<bos>=01+02=", 1)]
    assert [line.split(" -> ")[1].split("  ")[0].strip() for line in lines] == [row["completion"] for row in table]
    assert all(len(row["tokens"]) <= 4 for row in table)
    with pytest.raises(InputError, match=r"samples\.parquet' exists already; choose another"):
        run(["sample", "01+02=", "--run", str(path), "--output", str(output)])
    with pytest.raises(InputError, match=r"must end in \.parquet"):
        run(["sample", "01+02=", "--output", "samples.jsonl"])


def test_sample_of_a_run_on_messages_makes_the_text_a_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "base")
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE + "="
    tokenizer.save_pretrained(model)
    rows = [{"prompt": [{"role": "user", "content": f"{i:02}+01"}], "answer": f"{i + 1:03}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        **OPTIONS | {"steps": 1}, model=str(model), data=str(tmp_path / "rows.jsonl"), output=str(tmp_path / "run")
    )
    GRPOTrainer(config, quiet=True).train()
    assert run(["sample", "01+02", "--run", str(tmp_path / "run"), "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("<bos>01+02= -> ")


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_vllm_that_is_not_installed_is_named(verb: str) -> None:
    from gruppo.errors import MissingExtraError

    words = ["--max-new-tokens", "4", "--sampler", "vllm"] + (["1+1="] if verb == "sample" else ["--limit", "4"])
    with pytest.raises(MissingExtraError, match="'vllm', which is not installed"):
        run([verb, *words])


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_a_running_server_is_refused_since_its_model_is_not_the_one_that_is_named(verb: str) -> None:
    words = ["--max-new-tokens", "4", "--sampler", "vllm:http://127.0.0.1:9"]
    with pytest.raises(InputError, match=r"sampler='vllm:http://127.0.0.1:9' has a model of its own.*vllm:start"):
        run([verb, *words, *(["1+1="] if verb == "sample" else ["--limit", "4"])])


def test_sample_says_when_text_goes_past_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "base")
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE + "="
    tokenizer.save_pretrained(model)
    assert run(["sample", "01+02=", "--model", str(model)]) == 0
    past = capsys.readouterr()
    assert past.out.startswith("01+02= -> ")
    assert past.err == (
        "text prompts go in as they are; chat=true (--chat) puts them through the model's chat template\n"
    )
    assert run(["sample", "01+02", "--model", str(model), "--chat"]) == 0
    assert capsys.readouterr().err == "text prompts go through the chat template\n"
