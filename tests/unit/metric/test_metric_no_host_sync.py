"""`accumulate` asks the device for nothing: the host never waits inside a step.

There is no GPU here, so this is a proxy. The tensors are fake: they have a shape and a dtype but no numbers, and every
operation whose answer the host would need (`.item()`, `.tolist()`, `bool()`, `nonzero`, boolean indexing) raises. They
also claim to be on a GPU, because two checks of user input (that cu_seqlens rise, that advantages are finite) are made
on the host for CPU tensors, where that costs nothing, and skipped or left to the device on a GPU: without the claim the
CPU's branch would run, not the one in question.

What it cannot see: copies from the host that wait, and synchronisations inside a CUDA kernel's launcher. Lists instead
of tensors, and `position_ids` instead of `cu_seqlens`, do wait, by their nature.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from gruppo.loss import BNPOLoss, CISPOLoss, DAPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss, TruncatedWeight
from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric

WAITS = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.fixture
def fake(monkeypatch):
    """A function that turns a tensor into a fake one on a claimed GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with FakeTensorMode() as mode:
        yield mode.from_tensor


def arguments(fake, layout, per_token_advantages):
    shape = (2, 3) if layout == "padded" else (6,)
    inputs = {"labels": fake(torch.ones(shape, dtype=torch.int64))}
    if layout == "cu_seqlens":
        inputs["cu_seqlens"] = fake(torch.tensor([0, 2, 6]))
    outputs = {"logps": fake(torch.zeros(shape)), "entropies": fake(torch.zeros(shape))}
    advantages = fake(torch.zeros(shape if per_token_advantages else 2))
    return inputs, outputs, {"old_logps": fake(torch.zeros(shape)), "advantages": advantages}


layouts = pytest.mark.parametrize("layout", ["padded", "cu_seqlens"])
advantage_forms = pytest.mark.parametrize("per_token_advantages", [False, True])


@advantage_forms
@layouts
@pytest.mark.parametrize("top_k_kl", [0, 2])
@pytest.mark.parametrize("cls", [GRPOMetric, GSPOMetric, CISPOMetric])
def test_accumulate_does_not_wait_and_calculate_does(fake, cls, top_k_kl, layout, per_token_advantages):
    metric = cls(top_k_kl=top_k_kl)
    inputs, outputs, keywords = arguments(fake, layout, per_token_advantages)
    for _ in range(2):
        metric.accumulate(inputs, outputs, **keywords)
    with pytest.raises(WAITS):
        metric.calculate()


@layouts
@pytest.mark.parametrize("cls", [GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss, DAPOLoss])
def test_losses_do_not_wait_either(fake, cls, layout):
    inputs, outputs, keywords = arguments(fake, layout, per_token_advantages=False)
    loss = cls(beta=0.1, entropy_coef=0.1, correction=TruncatedWeight())
    other = keywords["old_logps"]
    result = loss(inputs, outputs, ref_logps=other, sampler_logps=other, **keywords)
    with pytest.raises(WAITS):
        result.loss.item()


def test_the_proxy_notices_a_wait(fake):
    inputs, outputs, keywords = arguments(fake, "padded", False)
    waits = [
        lambda: keywords["advantages"].sum().item(),
        lambda: keywords["advantages"].tolist(),
        lambda: bool(keywords["advantages"].isfinite().all()),
        lambda: inputs["labels"].nonzero(),
        lambda: outputs["logps"][inputs["labels"] != -100],
    ]
    for wait in waits:
        with pytest.raises(WAITS):
            wait()


def test_lists_wait_by_their_nature(fake):
    inputs, outputs, keywords = arguments(fake, "padded", False)
    with pytest.raises(WAITS):
        GRPOMetric().accumulate(inputs, outputs, old_logps=[[0.0] * 3] * 2, advantages=keywords["advantages"])
