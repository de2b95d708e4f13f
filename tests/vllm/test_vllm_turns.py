"""Episodes sampled by vLLM: its log-probs are the trainer's over all turns, and the policy learns to call a tool."""

from collections.abc import Callable
from typing import Any

import pytest

from gruppo.trainer import GRPOTrainer

CALCULATOR = {
    "model": "builtin-chat",
    "data": "builtin:calculator",
    "tools": ["gruppo.task.calculator:multiply"],
    "max_turns": 3,
    "max_new_tokens": 40,
    "prompts_per_step": 16,
    "group_size": 8,
    "temperature": 1.0,
    "lr": 3e-4,
    "eval_prompts": 64,
    "completions_every": 0,
}


@pytest.mark.parametrize("sampler", ["vllm", "vllm:start"])
def test_turns_of_vllm_have_the_trainers_log_probs_and_teach_the_tool(
    sampler: str, trainers: Callable[..., GRPOTrainer]
) -> None:
    changes: dict[str, Any] = CALCULATOR | {"sampler": sampler, "steps": 12}
    trainer = trainers(**changes)
    result = trainer.train()
    taken = result.metrics[1:]
    print(f"{sampler}: {result}, gap {max(line['sampler/logp_gap_max'] for line in taken):.2g}")
    assert max(line["sampler/logp_gap_max"] for line in taken) < 1e-4
    assert result.before is not None and result.after is not None
    assert result.before.accuracy == 0.0 and result.after.accuracy is not None and result.after.accuracy > 0.6
    rollouts = [rollout.trajectory for group in trainer.groups for rollout in group.rollouts]
    two = [t for t in rollouts if t.messages is not None and len(t.messages) > 2]
    assert len(two) > len(rollouts) / 2
    for trajectory in two:
        assert trajectory.sampled is not None and not all(trajectory.sampled)
        given = [token for token, own in zip(trajectory.tokens, trajectory.sampled, strict=True) if not own]
        said = [message["content"] for message in trajectory.messages or () if message["role"] == "tool"]
        # The turns and answers are whole: an answer for each turn but the last, unless the episode was cut.
        assert trainer.model.tokenizer.decode(given).count("<tool_response>") in (len(said), len(said) - 1)
