"""Data of a run: what was recognised is in the plan, and what is held out is in the run directory."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import step_rewards

from gruppo.task import read_rows
from gruppo.task.builtin import builtin_model_path, builtin_tokenizer
from gruppo.trainer import GRPOTrainer, TrainConfig

ROWS = [{"question": f"{i:02}+01=", "ground_truth": f"{i + 1:03}", "level": i % 3} for i in range(20)]


@pytest.fixture
def sums_file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The embedded model with a chat template: a user's turn stands after "+", the assistant's after "="."""
    folder = tmp_path / "chat_model"
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}+{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((builtin_model_path() / name).read_bytes())
    return folder


def test_held_out_rows_are_in_the_run_and_are_a_data_set(
    small_config: Callable[..., TrainConfig], sums_file: Path
) -> None:
    config = small_config(data=str(sums_file), eval_prompts=5)
    trainer = GRPOTrainer(config, quiet=True)
    trainer.close()
    file = Path(config.output) / "heldout.jsonl"
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = [prompt.index for prompt in trainer.prompts.held_out]
    assert len(chosen) == 5 and not {p.index for p in trainer.prompts.train} & set(chosen)
    expected = [
        {"prompt": r["question"], "ground_truth": r["ground_truth"], "level": r["level"], "answer": r["ground_truth"]}
        for r in (ROWS[i] for i in chosen)
    ]
    assert saved == expected
    again = read_rows(file)
    assert (list(again), again.recognised()) == (expected, [])


def test_values_that_json_lacks_are_saved_as_text(small_config: Callable[..., TrainConfig]) -> None:
    rows = [{"prompt": f"{i:02}+01=", "answer": "1", "day": date(2024, 1, 1 + i), "x": float("nan")} for i in range(6)]
    config = small_config(eval_prompts=1)
    GRPOTrainer(config, data=rows, quiet=True).close()
    [saved] = [json.loads(line) for line in (Path(config.output) / "heldout.jsonl").read_text().splitlines()]
    assert saved["day"].startswith("2024-01-0") and saved["x"] is None


def test_a_run_without_held_out_rows_has_no_file_of_them(small_config: Callable[..., TrainConfig]) -> None:
    config = small_config(eval_prompts=0)
    GRPOTrainer(config, quiet=True).close()
    assert not (Path(config.output) / "heldout.jsonl").exists()


def test_a_run_that_cannot_begin_leaves_nothing_behind(small_config: Callable[..., TrainConfig]) -> None:
    config = small_config(eval_prompts=5, lora=True, sampler="vllm:http://127.0.0.1:9", sampler_deadline=0.1)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9|vllm|vLLM"):
        GRPOTrainer(config, quiet=True)
    assert not Path(config.output).exists()


def test_the_plan_says_what_was_recognised(
    small_config: Callable[..., TrainConfig], sums_file: Path, chat_model: Path
) -> None:
    columns = "data: question is read as prompt; ground_truth is read as answer"
    expected = {
        ("builtin", False): columns,
        (
            str(chat_model),
            False,
        ): f"{columns}; text prompts go in as they are; chat=true (--chat) puts them through the model's chat template",
        (str(chat_model), True): f"{columns}; text prompts go through the chat template",
    }
    for (model, chat), line in expected.items():
        output = str(sums_file.parent / f"run-{Path(model).name}-{chat}")
        config = small_config(model=model, chat=chat, data=str(sums_file), output=output)
        trainer = GRPOTrainer(config, quiet=True)
        trainer.close()
        assert trainer.plan().lines(config)[0] == line


def test_chat_and_system_reach_the_prompts_of_a_run(
    small_config: Callable[..., TrainConfig], sums_file: Path, chat_model: Path
) -> None:
    config = small_config(model=str(chat_model), chat=True, system="9", data=str(sums_file), steps=1)
    trainer = GRPOTrainer(config, quiet=True)
    trainer.train()
    # <bos> + 9 + 0 0 + 0 1 = =: the row "00+01=" after the system message.
    assert trainer.prompts.train[0].token_ids == (1, 14, 13, 14, 4, 4, 14, 4, 5, 15, 15)
    assert {group.prompt.text[:8] for group in trainer.groups} == {"<bos>+9+"}


@pytest.mark.parametrize("as_function", [False, True])
def test_a_run_takes_verls_rows_and_function_as_they_are(
    small_config: Callable[..., TrainConfig], chat_model: Path, as_function: bool
) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i:02}+01="}],
            "reward_model": {"style": "rule", "ground_truth": f"{i + 1:03}"},
            "extra_info": {"split": "train"},
        }
        for i in range(8)
    ]
    config = small_config(model=str(chat_model), steps=2, completions_every=1, eval_prompts=2)
    rewards: list[Any] = [step_rewards.verl_score if as_function else "step_rewards:verl_score"]
    trainer = GRPOTrainer(config, data=rows, rewards=rewards, quiet=True)
    assert "reward_model.ground_truth is read as answer" in trainer.plan().lines(trainer.config)[0]
    result = trainer.train()
    table = pq.read_table(trainer.run.path / "completions" / "step-000002.parquet").to_pylist()
    lengths = [len(row["completion"]) for row in table]
    assert result.metrics[-1]["reward/verl_score/length"] == pytest.approx(sum(lengths) / len(lengths))
    assert [row["extra/length"] for row in table] == lengths
    assert {row["extra/gold"] for row in table} <= {f"{i + 1:03}" for i in range(8)}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_completion_goes_on_where_the_assistants_turn_stands(
    small_config: Callable[..., TrainConfig], chat_model: Path, tmp_path: Path, kind: str
) -> None:
    """The template writes the turns as "+", and what the model adds comes after the assistant's "1"."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i:02}"}, {"role": "assistant", "content": "1"}],
            "answer": f"{i:02}",
        }
        for i in range(10, 20)
    ]
    path = tmp_path / f"rows.{kind}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    seen: list[tuple[Any, Any]] = []

    def watch(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [i % 4 / 3 for i in range(len(completions))]

    config = small_config(model=str(chat_model), data=str(path), steps=2, eval_prompts=2)
    trainer = GRPOTrainer(config, rewards=[watch], quiet=True)
    texts = [prompt.text for prompt in trainer.prompts.train]
    assert sorted(texts) == sorted(f"<bos>+{p.source[0]['content']}=1" for p in trainer.prompts.train)
    trainer.train()
    groups = [(g.prompt.source, r.trajectory.text) for g in trainer.groups for r in g.rollouts]
    rewarded = [(prompt, completion[0]["content"]) for prompt, completion in seen]
    assert all(group in rewarded for group in groups)
    assert all(prompt[-1] == {"role": "assistant", "content": "1"} for prompt, _ in rewarded)
    again = GRPOTrainer(TrainConfig.of_run(config.output, {"steps": 3}), rewards=[watch], resume=True, quiet=True)
    assert again.train().step == 3
    assert {row["prompt"][1]["content"] for row in map(json.loads, again.run.held_out.read_text().splitlines())} == {
        "1"
    }
