"""The reference policy: the adapter switched off, or a copy that stays where it was."""

import math

import pytest
import torch
from tiny_models import (
    FAMILIES,
    actor,
    largest_gap,
    logps_one_by_one,
    perturb_adapter,
    random_features,
    tiny_model,
    weights,
)

from gruppo.errors import InputError
from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec

FEATURES = random_features(num=5, seed=21)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_with_the_adapter_off_the_logits_are_the_bases_to_the_bit(family: str) -> None:
    model = actor(family, lora=LoraSpec(rank=2))
    perturb_adapter(model.model)
    ids = torch.tensor([FEATURES[0].input_ids])
    with torch.no_grad(), model.model.disable_adapter():
        off = model.model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(off, tiny_model(family)(input_ids=ids).logits)
        assert not torch.equal(off, model.model(input_ids=ids).logits)


def test_the_reference_of_a_new_adapter_is_its_base_whatever_the_adapter_becomes() -> None:
    model = actor(lora=LoraSpec(rank=2))
    model.reference()
    perturb_adapter(model.model)
    base = actor().forward_only(FEATURES)["logps"]
    assert all(torch.equal(a, b) for a, b in zip(model.reference_logps(FEATURES), base, strict=True))


def test_the_reference_of_an_adapter_that_was_trained_before_is_the_model_at_the_start() -> None:
    model = actor(lora=LoraSpec(rank=2))
    perturb_adapter(model.model)
    start = model.forward_only(FEATURES)["logps"]
    model.set_loss(GRPOLoss(beta=0.5))
    model.set_optimizer("AdamW", lr=0.01)
    assert model.forward_backward(FEATURES, advantages=ADVANTAGES).terms["kl"].item() == 0.0
    model.clip_grad_and_step()
    assert model.forward_backward(FEATURES, advantages=ADVANTAGES).terms["kl"].item() > 1e-4
    moved = model.forward_only(FEATURES)["logps"]
    assert all(torch.equal(a, b) for a, b in zip(model.reference_logps(FEATURES), start, strict=True))
    # Scoring with the old adapter leaves the new one in its place.
    assert all(torch.equal(a, b) for a, b in zip(model.forward_only(FEATURES)["logps"], moved, strict=True))
    base = actor().forward_only(FEATURES)["logps"]
    assert largest_gap(start, base) > 0.01


def test_the_kl_to_the_reference_is_exactly_zero_at_the_first_step() -> None:
    for lora in (None, LoraSpec(rank=2)):
        model = actor(lora=lora)
        model.set_loss(GRPOLoss(beta=0.5))
        result = model.forward_backward(FEATURES, advantages=ADVANTAGES)
        assert result.terms["kl"].item() == 0.0
        assert result.loss.item() == result.terms["policy"].item()


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_the_kl_after_steps_is_that_to_the_start(lora: LoraSpec | None) -> None:
    start, _ = logps_one_by_one(tiny_model("llama"), FEATURES)
    model = actor(lora=lora)
    model.set_loss(GRPOLoss(beta=0.5))
    model.set_optimizer("AdamW", lr=0.01)
    for _ in range(3):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        model.clip_grad_and_step()
    assert largest_gap(model.reference_logps(FEATURES), start) < 1e-5
    result = model.forward_backward(FEATURES, advantages=ADVANTAGES)
    now = model.forward_only(FEATURES)["logps"]
    # k3: the mean over sequences of the mean over tokens of exp(-d) + d - 1, d = logp - ref
    deltas = [(a.double() - b.double()).tolist() for a, b in zip(now, start, strict=True)]
    expected = sum(sum(math.exp(-d) + d - 1 for d in row) / len(row) for row in deltas) / len(deltas)
    assert expected > 1e-4
    assert result.terms["kl"].item() == pytest.approx(expected, rel=1e-4)


def test_the_frozen_copy_stays_put_while_the_weights_move() -> None:
    model = actor()
    model.set_loss(GRPOLoss(beta=0.1))  # freezes the reference
    start = weights(model.model)
    model.set_optimizer("AdamW", lr=0.01)
    for _ in range(2):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        model.clip_grad_and_step()
    assert all(torch.equal(p, start[n]) for n, p in model.reference().state().items())
    assert not any(torch.equal(p, start[n]) for n, p in weights(model.model).items())
    with model.reference().logp_model() as logp_model:
        assert not any(p.requires_grad for p in logp_model.model.parameters())


def test_refresh_makes_the_policy_the_reference() -> None:
    model = actor()
    model.set_loss(GRPOLoss(beta=0.1))
    model.set_optimizer("AdamW", lr=0.01)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()
    assert model.forward_backward(FEATURES, advantages=ADVANTAGES).terms["kl"].item() > 0.0
    model.reference().refresh()
    assert model.forward_backward(FEATURES, advantages=ADVANTAGES).terms["kl"].item() == 0.0


def test_refresh_of_an_adapter_copies_it_and_survives_a_save() -> None:
    model = actor(lora=LoraSpec(rank=2))
    reference = model.reference()
    assert reference.state() == {}  # the adapter is switched off
    perturb_adapter(model.model)
    reference.refresh()
    now = model.forward_only(FEATURES)["logps"]
    assert all(torch.equal(a, b) for a, b in zip(model.reference_logps(FEATURES), now, strict=True))
    other = actor(lora=LoraSpec(rank=2))
    other.reference().load(reference.state())
    assert all(torch.equal(a, b) for a, b in zip(other.reference_logps(FEATURES), now, strict=True))


def test_a_mixture_of_adapters_is_refused() -> None:
    with pytest.raises(InputError, match=r"mix=0\.5 needs full weights; with LoRA the reference can only be copied"):
        actor(lora=LoraSpec(rank=2)).reference().refresh(0.5)


def test_a_reference_frozen_late_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    model = actor()
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()
    model.set_loss(GRPOLoss(beta=0.1))
    assert "frozen after 1 steps" in caplog.text


def test_reference_logps_of_the_features_are_used_when_they_have_them() -> None:
    from dataclasses import replace

    model = actor()
    model.set_loss(GRPOLoss(beta=1.0))
    now = model.forward_only(FEATURES)["logps"]
    shifted = [replace(f, ref_logps=tuple((x + 0.1).tolist())) for f, x in zip(FEATURES, now, strict=True)]
    result = model.forward_backward(shifted, advantages=[0.0] * 5)
    # delta = -0.1 everywhere: k3 = exp(0.1) - 0.1 - 1
    assert result.loss.item() == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)
