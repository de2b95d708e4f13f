"""Compiled blocks: the loss and gradient of eager ones, few graphs, and a model that does not compile.

The compiler's front end runs for real; `aot_eager` runs its graphs without generating code, which takes seconds here.
"""

import logging
from functools import cache
from typing import NamedTuple

import pytest
import torch
from tiny_models import actor, gradients, random_features, tiny_model
from torch._dynamo.utils import counters

from gruppo.errors import InputError
from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.compiled_blocks import CompiledBlocks, find_blocks
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import InputFeature

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler looks at it
]


def shared_features(seed: int, groups: int = 3, size: int = 4) -> list[InputFeature]:
    """Groups of sequences with a prompt in common, of random lengths."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(0, 32, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw).tolist()
        )

    prompts = [tokens(10, 40) for _ in range(groups)]
    return [InputFeature(prompt_ids=p, completion_ids=tokens(3, 30)) for p in prompts for _ in range(size)]


class Compared(NamedTuple):
    losses: list[tuple[float, float]]
    gradients: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    num_graphs: int


@cache
def compared(layout: str, recomputed: bool, lora: LoraSpec | None, num: int) -> Compared:
    """Eager and compiled blocks on batches of random lengths."""
    options = {"layout": layout, "gradient_checkpointing": recomputed, "lora": lora}
    eager, compiled = (actor("qwen3", **options) for _ in range(2))
    torch._dynamo.reset()
    counters.clear()
    CompiledBlocks(compiled.logp_model.base, backend="aot_eager")
    losses = []
    for seed in range(num):
        features = shared_features(seed)
        advantages = [(-1.0) ** i * (1 + i / 7) for i in range(len(features))]
        one, other = (model.forward_backward(features, advantages=advantages).loss for model in (eager, compiled))
        losses.append((float(one), float(other)))
    return Compared(losses, (gradients(eager.model), gradients(compiled.model)), counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("layout", "recomputed", "lora"),
    [
        ("padded", False, None),
        pytest.param("padded", True, LoraSpec(rank=2), marks=pytest.mark.long),
        pytest.param("shared", True, LoraSpec(rank=2), marks=pytest.mark.long),
    ],
    ids=["plain", "recomputed adapter", "shared, recomputed adapter"],
)
def test_compiled_blocks_give_the_loss_and_gradient_of_eager_ones(layout: str, recomputed: bool, lora) -> None:
    found = compared(layout, recomputed, lora, 1 if lora else 8)
    for one, other in found.losses:
        assert other == pytest.approx(one, rel=1e-6, abs=1e-6)
    assert found.num_graphs >= 1  # on shared prompts: of the comparison with padded rows
    ours, theirs = found.gradients
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_random_lengths_compile_few_graphs() -> None:
    assert 1 <= compared("padded", False, None, 8).num_graphs <= 3


def test_decoding_with_a_cache_is_left_as_it_is() -> None:
    model = TransformersModel("builtin", device="cpu", compile=False)
    params = SamplingParams(max_new_tokens=4, seed=1, step=0)
    expected = TorchSampler(model).draw(["12+9=", "47+85="], 3, params)
    torch._dynamo.reset()
    counters.clear()
    CompiledBlocks(model.logp_model.base, backend="aot_eager")
    assert TorchSampler(model).draw(["12+9=", "47+85="], 3, params) == expected
    assert counters["stats"]["unique_graphs"] == 0


def test_a_model_that_does_not_compile_runs_as_it_is_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph, inputs):
        raise RuntimeError("this backend cannot do it")

    eager, model = actor("qwen3"), actor("qwen3")
    torch._dynamo.reset()
    CompiledBlocks(model.logp_model.base, backend=broken)  # type: ignore[arg-type]
    features = random_features(num=6, seed=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            logps = model.forward_only(features)["logps"]
    for mine, theirs in zip(logps, eager.forward_only(features)["logps"], strict=True):
        assert torch.equal(mine, theirs)
    lines = [r.getMessage() for r in caplog.records if "not compiled" in r.getMessage()]
    assert len(lines) == 1 and "this backend cannot do it" in lines[0]


def test_a_reference_taken_from_compiled_blocks_keeps_its_own_weights() -> None:
    model = actor("qwen3", layout="padded")
    features = random_features(num=4, seed=3)
    expected = model.forward_only(features)["logps"]
    torch._dynamo.reset()
    CompiledBlocks(model.logp_model.base, backend="aot_eager")
    model.set_loss(GRPOLoss(beta=0.1))  # freezes the reference
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.5)
    for mine, theirs in zip(model.reference_logps(features), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_are_the_list_of_equal_layers() -> None:
    assert len(find_blocks(tiny_model("llama"))) == tiny_model("llama").config.num_hidden_layers
    assert find_blocks(torch.nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": True}, "offload=True moves what gradient_checkpointing=True keeps"),
        ({"offload": True, "gradient_checkpointing": True}, "there is no GPU, device=cpu"),
        ({"keep_activations": 0.5}, "needs compiled blocks"),
        ({"keep_activations": 1.5, "compile": True}, "above 0 and at most 1"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TransformersModel("builtin", device="cpu", **options)


@pytest.mark.long
def test_models_that_keep_other_shares_have_graphs_of_their_own() -> None:
    features = shared_features(0)
    torch._dynamo.reset()
    counters.clear()
    seen = []
    for keep in (1.0, 0.5):
        model = actor("qwen3", layout="padded")
        CompiledBlocks(model.logp_model.base, keep=keep, backend="aot_eager")
        model.forward_backward(features, advantages=[1.0] * len(features))
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[1] == 2 * seen[0]
