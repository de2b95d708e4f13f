"""torch's default dtype decides nothing: a step under another one gives the same numbers, to the bit."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.advantage import ADVANTAGES, OPOAdvantage
from gruppo.loss import CORRECTIONS, LOSSES
from gruppo.metric import MismatchMetric, metric_for
from gruppo.model import TransformersModel
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import InputFeature

others = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
FEATURES = [InputFeature(prompt_ids=(4, 5 + i % 3), completion_ids=(6, 7, 8, 9, 10)[: 2 + i % 4]) for i in range(8)]
ADVANTAGES_8 = [1.0, -1.0, 0.5, 0.0, 2.0, -0.5, 0.25, -2.0]
OLD = [[-1.5 + 0.1 * ((3 * i + j) % 5) for j in range(f.num_scored)] for i, f in enumerate(FEATURES)]
SAMPLER = [[x - 0.05 * ((i + j) % 3) for j, x in enumerate(row)] for i, row in enumerate(OLD)]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def in_float32(make: Callable[..., Any], *given: str) -> Any:
    return make(*given)


def same(dtype: torch.dtype, make: Callable[..., Any], *given: str) -> None:
    expected = in_float32(make, *given)
    with default(dtype):
        found = make(*given)
    assert found == expected


def step(loss: str, layout: Any) -> Any:
    parameters = inspect.signature(LOSSES[loss]).parameters
    given = {"beta": 0.1, "max_completion_length": 8} | (
        {}
        if "correction" not in parameters or loss in ("decoupled_ppo", "vespo")
        else {"correction": CORRECTIONS["mask"]}
    )
    made = LOSSES[loss](**{name: value for name, value in given.items() if name in parameters})
    model = TransformersModel("builtin", device="cpu", tokens_per_microbatch=30, layout=layout)
    model.set_loss(made)
    model.set_optimizer("AdamW", lr=1e-3)
    model.add_metric(metric_for(made))
    out = model.forward_backward(FEATURES, advantages=ADVANTAGES_8, old_logps=OLD, sampler_logps=SAMPLER)
    report = model.clip_grad_and_step(0.1)
    scores = [(x.dtype, x.tolist()) for rows in model.forward_only(FEATURES).values() for x in rows]
    return out.loss.item(), report.grad_norm, scores, model.calculate_metric()


@others
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "top_entropy", "kl_cov", "clip_cov", "m2po"])
def test_a_step_gives_the_same_bits(loss: str, layout: str, dtype: torch.dtype) -> None:
    same(dtype, step, loss, layout)


def by_hand(name: str) -> Any:
    takes = inspect.signature(LOSSES[name]).parameters
    loss = LOSSES[name](**({"max_completion_length": 8} if "max_completion_length" in takes else {}))
    logps = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -3.0]], dtype=torch.float32, requires_grad=True)
    outputs = {"logps": logps, "entropies": torch.ones(2, 3, dtype=torch.float32)}
    inputs = {"labels": torch.zeros(2, 3, dtype=torch.int64)}
    old, sampler = [[-1.1, -1.9, -0.4], [-1.4, -0.3, -2.9]], [[-1.2, -1.9, -0.4], [-1.4, -0.3, -2.9]]
    output = loss(inputs, outputs, advantages=[0.1, -1 / 3], old_logps=old, sampler_logps=sampler, ref_logps=sampler)
    output.loss.backward()
    metric, gap = metric_for(loss), MismatchMetric()
    metric.accumulate(inputs, {k: v.detach() for k, v in outputs.items()}, advantages=[0.1, -1 / 3], old_logps=old)
    gap.accumulate(inputs, old_logps=old, sampler_logps=sampler)
    assert logps.grad is not None
    return output.loss.dtype, output.loss.item(), logps.grad.tolist(), metric.calculate(), gap.calculate()


@others
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_called_by_hand_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    same(dtype, by_hand, name)


def advantages(name: str) -> Any:
    estimate: Any = ADVANTAGES[name]()
    given = {"lengths": [1001.0, 2.0, 3.0, 4.0] * 2, "greedy_rewards": [0.0, 0.5] * 4, "correct": [True, False] * 4}
    rewards: Any = [[0.1, 0.2], [1.0, 0.0], [0.3, 0.3], [0.7, 1e-3]] * 2 if estimate.per_reward else [0.1, 1 / 3] * 4
    found = estimate(rewards, group_ids=[0] * 4 + [1] * 4, **{n: given[n] for n in (*estimate.needs, *estimate.uses)})
    return found.dtype, found.tolist()


@others
@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    same(dtype, advantages, name)


def test_lengths_given_as_floats_are_not_rounded_to_the_default_dtype() -> None:
    """The baseline weighs by length: (1001*1 + 1*0) / 1002; bfloat16 has no 1001."""
    with default(torch.bfloat16):
        found = OPOAdvantage()([1.0, 0.0], num_generations=2, lengths=[1001.0, 1.0])
    assert found.tolist() == pytest.approx([1 - 1001 / 1002, -1001 / 1002], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_run_gives_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(name: str) -> list[dict[str, Any]]:
        small: dict[str, Any] = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4, "beta": 0.1}
        config = TrainConfig(**small, eval_prompts=4, minibatches=2, threads=1, output=str(tmp_path / name))
        return GRPOTrainer(config, quiet=True).train().metrics

    expected = run("plain")
    with default(dtype):
        found = run("other")
    assert len(found) == 3
    assert found == expected
