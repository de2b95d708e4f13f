"""RewardModel: its scores are those of a plain forward of transformers on each text alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from gruppo.errors import InputError
from gruppo.reward import RewardScorer, load_reward
from gruppo.task.builtin import builtin_model_path
from gruppo.trainer import GRPOTrainer, TrainConfig

TEMPLATE = "{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"
PROMPTS = ["1+2=", "47+85=", "3+3=", "0="]
ANSWERS = ["3", "132", "", "0123456789"]


def save(folder: Path, kind: str = "qwen3", labels: int = 1, template: str = TEMPLATE) -> Path:
    """A reward model with random weights, large enough that no two texts score alike."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(builtin_model_path())
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": labels, "max_position_embeddings": 64}
    if kind == "qwen3":
        model: Any = Qwen3ForSequenceClassification(Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8))
    else:
        model = BertForSequenceClassification(BertConfig(**sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def plainly_scored(folder: Path, texts: list[str], *, special: bool) -> list[float]:
    """One text at a time, so that there is no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids for text in texts]
        return [model(input_ids=each).logits.item() for each in ids]


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_scores_as_in_a_plain_forward(tmp_path: Path, kind: str, batch_size: int) -> None:
    folder = save(tmp_path / "judge", kind)
    with RewardScorer([f"{folder}:batch_size={batch_size}", "exact_match"]) as scorer:
        result = scorer.score(PROMPTS, ANSWERS, columns={"answer": ["3", "131", "6", "0"]})
    expected = plainly_scored(folder, [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)], special=True)
    assert result.values["judge"] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == 4
    assert result.correct == [True, False, False, False]  # a verifier decides, not the model


def test_conversations_go_through_the_models_own_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "judge")
    prompts = [[{"role": "user", "content": text}] for text in ("1", "47")]
    with RewardScorer([str(folder)]) as scorer:
        values = scorer.score(prompts, ["3", "132"]).values["judge"]
    assert values == pytest.approx(plainly_scored(folder, ["+1=3", "+47=132"], special=False), abs=1e-5)


def test_a_turn_that_was_begun_in_the_prompt_is_one_with_its_completion(tmp_path: Path) -> None:
    folder = save(tmp_path / "judge")
    prompt = [{"role": "user", "content": "47"}, {"role": "assistant", "content": "1"}]
    with RewardScorer([str(folder)]) as scorer:
        values = scorer.score([prompt], ["32"]).values["judge"]
    assert values == pytest.approx(plainly_scored(folder, ["+47=132"], special=False), abs=1e-5)


def test_text_beyond_the_context_is_cut_off(tmp_path: Path) -> None:
    folder = save(tmp_path / "judge", "bert")  # 64 positions, the first for the start token
    with RewardScorer([str(folder)]) as scorer:
        values = scorer.score(["1=", "1="], ["7" * 300, "7" * 61]).values["judge"]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_a_model_trains_another(tmp_path: Path) -> None:
    folder = save(tmp_path / "judge")
    config = TrainConfig(
        rewards=(str(folder), "exact_match"),
        reward_weights=(0.5, 2.0),
        prompts_per_step=2,
        group_size=4,
        max_new_tokens=4,
        eval_prompts=0,
        tensorboard=False,
        output=str(tmp_path / "run"),
    )
    trainer = GRPOTrainer(config, quiet=True)
    try:
        trainer.step()
    finally:
        trainer.close()
    rollouts = [r for g in trainer.groups for r in g.rollouts]
    texts = [r.trajectory.prompt.text + r.trajectory.text for r in rollouts]
    assert [r.rewards["judge"] for r in rollouts] == pytest.approx(
        plainly_scored(folder, texts, special=True), abs=1e-5
    )
    for rollout in rollouts:
        assert rollout.reward == pytest.approx(0.5 * rollout.rewards["judge"] + 2 * rollout.rewards["exact_match"])


def test_what_is_no_reward_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a Qwen3ForCausalLM, which has no score head.*with one label"):
        load_reward(str(builtin_model_path()))
    with pytest.raises(InputError, match="has 3 labels, and a reward is one number; use a model with num_labels=1"):
        load_reward(str(save(tmp_path / "three", labels=3)))
    pickled = save(tmp_path / "pickled")
    shutil.move(pickled / "model.safetensors", pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_reward(str(pickled))
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        load_reward("./no/such/folder")
    judge = save(tmp_path / "judge")
    with pytest.raises(
        InputError, match=r"has no option 'batch' .did you mean 'batch_size'.*; it has model, batch_size"
    ):
        load_reward(f"{judge}:batch=3")
    with pytest.raises(InputError, match="must be at least 1, got 0"):
        load_reward(f"{judge}:batch_size=0")


def test_conversations_need_a_template(tmp_path: Path) -> None:
    folder = save(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    with (
        RewardScorer([str(folder)]) as scorer,
        pytest.raises(InputError, match=r"prompts are conversations, and reward model .* has no chat template"),
    ):
        scorer.score([[{"role": "user", "content": "1"}]], ["3"])


def test_a_conversation_that_the_template_refuses_fails_alone(tmp_path: Path) -> None:
    refuses = "{% if messages[0].content == '7' %}{{ raise_exception('no seven') }}{% endif %}" + TEMPLATE
    folder = save(tmp_path / "judge", template=refuses)
    prompts = [[{"role": "user", "content": text}] for text in ("1", "7", "47")]
    with RewardScorer([str(folder)]) as scorer:
        result = scorer.score(prompts, ["3", "8", "132"])
    expected = plainly_scored(folder, ["+1=3", "+47=132"], special=False)
    assert [result.values["judge"][i] for i in (0, 2)] == pytest.approx(expected, abs=1e-5)
    assert result.values["judge"][1] is None and "no seven" in result.failures["judge"][1]
