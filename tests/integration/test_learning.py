"""The embedded models learn from a verifier, and from nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from gruppo.cli.demo import CALCULATOR_PRESET
from gruppo.trainer import GRPOTrainer

pytestmark = pytest.mark.slow
Make = Callable[..., GRPOTrainer]


def accuracies(trainer: GRPOTrainer) -> tuple[float, float]:
    result = trainer.train()
    assert result.before is not None and result.after is not None
    return result.before.accuracy, result.after.accuracy


@pytest.mark.parametrize(
    ("steps", "options"),
    [(40, {}), (20, {"lora": True, "lr": 1e-3, "beta": 0.01})],
    ids=["full", "lora"],
)
def test_a_few_steps_with_the_right_reward_lift_held_out_accuracy_above_0_6(
    steps: int, options: dict[str, Any], demo_trainer: Make
) -> None:
    # Measured over seeds: 0.99 to 1.00 after 40 steps of all weights, 0.91 to 0.96 after 20 of an adapter.
    before, after = accuracies(demo_trainer(steps=steps, **options))
    assert 0.2 < before < 0.4
    assert after > 0.6


def test_rollouts_ahead_lift_it_above_0_97(demo_trainer: Make) -> None:
    # Measured: 0.994 to 0.998 on five seeds with max_staleness 1 and 2, 0.998 on two with streaming.
    assert accuracies(demo_trainer(steps=40, max_staleness=2))[1] >= 0.97


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [{"max_staleness": 1}, {"max_staleness": 2}, {"max_staleness": 2, "streaming": True}],
    ids=["1", "2", "streamed"],
)
def test_rollouts_ahead_do_so_whatever_the_seed(options: dict[str, Any], seed: int, demo_trainer: Make) -> None:
    assert accuracies(demo_trainer(steps=40, seed=seed, **options))[1] >= 0.97


def test_ten_steps_teach_the_chat_model_to_call_its_tool(demo_trainer: Make) -> None:
    # Measured: 0.93 to 0.96 of 512 prompts on three seeds.
    before, after = accuracies(demo_trainer(CALCULATOR_PRESET, lr=3e-4, steps=10, eval_prompts=64))
    assert before == 0.0
    assert after > 0.6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_forty_steps_lift_its_products_above_0_97_whatever_the_seed(seed: int, demo_trainer: Make) -> None:
    # Measured: 1.000, 0.996 and 0.994, in about 20 s of one core each.
    before, after = accuracies(demo_trainer(CALCULATOR_PRESET, lr=3e-4, seed=seed))
    assert before == 0.0
    assert after >= 0.97


def test_thirty_steps_with_a_random_reward_lift_nothing(demo_trainer: Make) -> None:
    # 512 prompts at 0.3 have a standard error of 0.02; measured over seeds, not one greedy answer changes.
    trainer = demo_trainer(steps=30, rewards=("learning_rewards:coin",))
    before, start = exact_accuracy(trainer), trainer.model.model.lm_head.weight.detach().clone()
    for _ in range(30):
        trainer.step()
    after = exact_accuracy(trainer)
    assert (trainer.model.model.lm_head.weight - start).abs().max() > 5e-4  # the coin does move the weights
    assert 0.2 < before < 0.4
    assert after < before + 0.06


def exact_accuracy(trainer: GRPOTrainer) -> float:
    """Greedy accuracy on the held-out prompts, whatever the trainer's reward is."""
    from gruppo.sampler import SamplingParams

    prompts = trainer.prompts.held_out.prompts
    responses = trainer.sampler.sample(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=4))
    right = [r.sequences[0].text == p.columns["answer"] for p, r in zip(prompts, responses, strict=True)]
    return sum(right) / len(right)
