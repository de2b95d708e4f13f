"""Gradients: REINFORCE at ratio 1, finite differences, and what happens far outside every trust region."""

import math

import pytest
import torch
from loss_batch import SEVEN, Batch, assert_same, every_term, seven_losses, value_and_grad

from gruppo.loss import Clip, PolicyLoss, TruncatedWeight, sequence_level, sequence_token_level

BATCH = Batch.random([4, 1, 6, 2], seed=9)


def reinforce_weights(name, mask):
    """What one token counts, by the definition of each loss."""
    num_sequences, length = len(mask), mask.sum(1, keepdim=True).double()
    if name in ("GRPO", "GSPO", "SAPO"):
        weights = 1 / (num_sequences * length)
    elif name == "DRGRPO":
        weights = torch.full_like(length, 1 / (num_sequences * 1024))
    else:
        weights = 1 / length.sum().expand_as(length)
    return torch.where(mask, weights, 0.0)


@pytest.mark.parametrize("old", ["absent", "equal"])
@seven_losses
def test_ratio_one_gives_the_reinforce_gradient(name, old):
    old_logps = None if old == "absent" else BATCH.values["logps"]
    _, grad, _ = value_and_grad(SEVEN[name](), BATCH, old_logps=old_logps)
    logps = BATCH.values["logps"].clone().requires_grad_()
    reinforce = -(reinforce_weights(name, BATCH.mask) * BATCH.advantages[:, None] * logps).sum()
    assert_same(grad, torch.autograd.grad(reinforce, logps)[0])


@pytest.mark.parametrize("tau", [0.5, (1.0, 1.05), 4.0])
def test_sapo_gives_the_reinforce_gradient_for_any_tau(tau):
    _, grad, _ = value_and_grad(SEVEN["SAPO"](tau=tau), BATCH, old_logps=None)
    assert_same(grad, -reinforce_weights("SAPO", BATCH.mask) * BATCH.advantages[:, None])


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "BNPO", "DRGRPO", "DAPO"])
def test_on_policy_loss_is_minus_the_weighted_advantage(name):
    value, _, _ = value_and_grad(SEVEN[name](), BATCH, old_logps=None)
    assert_same(value, -(reinforce_weights(name, BATCH.mask) * BATCH.advantages[:, None]).sum())


def test_gspo_ratio_is_constant_within_a_sequence():
    _, grad, _ = value_and_grad(SEVEN["GSPO"](clip_range=0.9), BATCH)
    for row, keep in zip(grad, BATCH.mask, strict=True):
        assert_same(row[keep], row[keep][0].expand(int(keep.sum())))


def test_sequence_token_level_has_the_gradient_of_gspo_for_one_advantage_per_sequence():
    parts = {"surrogate": Clip(0.9, 0.9)}  # wide, so that nothing is cut off
    gspo = value_and_grad(PolicyLoss(level=sequence_level, **parts), BATCH)
    assert_same(value_and_grad(PolicyLoss(level=sequence_token_level, **parts), BATCH), gspo)


def test_sequence_token_level_gives_each_token_its_own_advantage():
    # s = exp(mean(0.2, 0.4)) = e^0.3 for both tokens; the gradient is -s * A_t / 2, GSPO's would be -s * mean(A) / 2
    logps = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    loss = PolicyLoss(level=sequence_token_level, surrogate=Clip(0.9, 0.9))
    advantages = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    old = logps.detach() - torch.tensor([[0.2, 0.4]])
    loss({"labels": torch.tensor([[1, 2]])}, {"logps": logps}, advantages=advantages, old_logps=old).loss.backward()
    assert logps.grad[0].tolist() == pytest.approx([-math.exp(0.3) / 2, -3 * math.exp(0.3) / 2], rel=1e-7)


# --- finite differences ---------------------------------------------------------------------------------------------
# Log-ratios and their means over a sequence keep 0.03 from the kinks ln 0.8 = -0.22, ln 1.2 = 0.18, ln 1.28 = 0.25.
# CISPO's weight has a stopped gradient, so its differences agree only where the weight is at its cap.

LOG_RATIOS = [[0.0, 0.1, -0.4, 0.35], [0.0, -0.3, 0.0, 0.0], [0.0, 0.4, 0.1, 0.3]]
ABOVE_THE_CAP = [[0.0, 0.3, 0.4, 0.35], [0.0, 0.6, 0.0, 0.0], [0.0, 0.4, 0.5, 0.3]]


@pytest.mark.parametrize("kl_estimator", [0, 1, 2, 3])
@seven_losses
def test_gradient_agrees_with_finite_differences(name, kl_estimator):
    batch = Batch.random([4, 2, 4], seed=10)
    inputs, _, keywords = batch.arguments()
    logps = batch.values["logps"]
    keywords["old_logps"] = logps - torch.tensor(ABOVE_THE_CAP if name == "CISPO" else LOG_RATIOS, dtype=torch.float64)
    loss = every_term(name, kl_estimator=kl_estimator)

    def call(logps, entropies):
        return loss(inputs, {"logps": logps, "entropies": entropies}, **keywords).loss

    leaves = logps.clone().requires_grad_(), batch.values["entropies"].clone().requires_grad_()
    assert torch.autograd.gradcheck(call, leaves)


@seven_losses
def test_gradient_through_logits_agrees_with_finite_differences(name):
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[-100, 1, 3], [-100, 2, -100]])
    old = logits.detach().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    gaps = torch.tensor([[0.0, 0.35, 0.4], [0.0, 0.6, 0.0]], dtype=torch.float64)  # above every cap
    loss = SEVEN[name](entropy_coef=0.1)

    def call(logits):
        return loss({"labels": labels}, {"logits": logits}, advantages=[-1.0, -0.5], old_logps=old - gaps).loss

    assert torch.autograd.gradcheck(call, (logits,))


# --- far outside ----------------------------------------------------------------------------------------------------
# One row of one token each, logp = old + gap, so every loss is the mean over rows of the token's loss (DRGRPO / 1024).

GAPS = [50.0, -50.0, 800.0, -800.0]


def far_outside(name, advantage):
    """(loss, gradient) of four one-token rows with the log-ratios GAPS, in float32."""
    logps = torch.tensor([[g] for g in GAPS], requires_grad=True)
    options = {"max_completion_length": 1} if name == "DRGRPO" else {}
    inputs, old = {"labels": torch.ones(4, 1, dtype=torch.int64)}, torch.zeros(4, 1)
    value = SEVEN[name](**options)(inputs, {"logps": logps}, advantages=[advantage] * 4, old_logps=old).loss
    value.backward()
    return value.item(), logps.grad[:, 0].tolist()


FAR, NEAR = math.exp(20), math.exp(-20)
# The log-ratio is bounded to +-20. A = 1: min(e^20, 1 + high) twice and e^-20 twice. A = -1: e^20 twice, 0.8 twice.
FAR_VALUES = {
    "GRPO": (-(1.2 + NEAR) / 2, (FAR + 0.8) / 2),
    "GSPO": (-(1.2 + NEAR) / 2, (FAR + 0.8) / 2),
    "BNPO": (-(1.2 + NEAR) / 2, (FAR + 0.8) / 2),
    "DRGRPO": (-(1.2 + NEAR) / 2, (FAR + 0.8) / 2),
    "DAPO": (-(1.28 + NEAR) / 2, (FAR + 0.8) / 2),
    # the gate is 1 far above and sigmoid(-1) far below
    "SAPO": (-2 * (1 + 1 / (1 + math.e)), 2 * (1 + 1 / (1 + math.e))),
}


@pytest.mark.parametrize("name", FAR_VALUES)
@pytest.mark.row("R-32", "log-ratios far outside")
def test_log_ratio_is_bounded_far_outside(name):
    expected = FAR_VALUES[name]
    assert [far_outside(name, a)[0] for a in (1.0, -1.0)] == pytest.approx(list(expected), rel=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", FAR_VALUES)
def test_gradient_is_zero_far_outside(name, advantage):
    assert far_outside(name, advantage)[1] == [0.0] * 4


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_weighs_log_p_with_the_bounded_ratio_far_outside(advantage):
    # No token's gradient is cut off: -min(e^+-20, 1.2) * A / 4
    value, grad = far_outside("CISPO", advantage)
    weights = [1.2, NEAR, 1.2, NEAR]
    assert grad == pytest.approx([-w * advantage / 4 for w in weights], rel=1e-6)
    assert value == pytest.approx(-sum(w * g * advantage for w, g in zip(weights, GAPS, strict=True)) / 4, rel=1e-6)


@pytest.mark.parametrize("gap", [-19.0, 19.0])
def test_gradient_flows_inside_the_bound(gap):
    logps = torch.tensor([[gap]], dtype=torch.float64, requires_grad=True)
    advantage = 1.0 if gap < 0 else -1.0  # the side that the clip leaves open
    inputs, old = {"labels": torch.tensor([[1]])}, torch.zeros(1, 1, dtype=torch.float64)
    SEVEN["GRPO"]()(inputs, {"logps": logps}, advantages=[advantage], old_logps=old).loss.backward()
    assert logps.grad.item() == pytest.approx(-advantage * math.exp(gap))


# d = logp - ref is bounded to +-40; ratio 1 (no old_logps)
FAR_KL = {
    0: lambda d: d,
    1: lambda d: d * d / 2,
    2: lambda d: math.expm1(-d) + d,
    3: lambda d: d,
}


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("estimator", [0, 1, 2, 3])
def test_kl_is_bounded_far_outside(estimator, gap):
    logps = torch.tensor([[0.0]], requires_grad=True)
    loss = SEVEN["GRPO"](beta=1.0, kl_estimator=estimator)
    ref = torch.tensor([[-gap]])
    value = loss({"labels": torch.tensor([[1]])}, {"logps": logps}, advantages=[0.0], ref_logps=ref).loss
    value.backward()
    bounded = math.copysign(40.0, gap)
    assert value.item() == pytest.approx(FAR_KL[estimator](bounded), rel=1e-6)
    # ratio * d keeps the derivative of the ratio, which is r * d with r = 1; nothing else has a slope there
    assert logps.grad.item() == pytest.approx(bounded if estimator == 3 else 0.0, rel=1e-6)


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@seven_losses
@pytest.mark.row("R-32", "half-precision log-probs")
def test_narrow_log_probs_are_computed_in_float32(name, dtype):
    inputs, outputs, keywords = BATCH.arguments()
    narrow = {k: v.to(dtype).requires_grad_() for k, v in outputs.items()}
    wide = {k: v.detach().float().requires_grad_() for k, v in narrow.items()}
    keywords = {k: v.float() for k, v in keywords.items()}
    got, expected = every_term(name)(inputs, narrow, **keywords).loss, every_term(name)(inputs, wide, **keywords).loss
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    got.backward()
    expected.backward()
    assert torch.equal(narrow["logps"].grad, wide["logps"].grad.to(dtype))


def test_float64_log_probs_are_computed_in_float64():
    value, grad, _ = value_and_grad(every_term("GRPO"), BATCH)
    assert (value.dtype, grad.dtype) == (torch.float64, torch.float64)


@seven_losses
def test_float32_agrees_with_float64(name):
    inputs, outputs, keywords = BATCH.arguments()
    narrow = every_term(name)(
        inputs, {k: v.float() for k, v in outputs.items()}, **{k: v.float() for k, v in keywords.items()}
    )
    wide = every_term(name)(inputs, outputs, **keywords)
    assert narrow.loss.item() == pytest.approx(wide.loss.item(), rel=1e-5)


def test_old_logps_with_a_graph_are_taken_as_constants():
    # Handing over the same tensor twice must not cancel the gradient: REINFORCE's is -A / (S * n)
    batch = BATCH.leaves()
    inputs, outputs, keywords = batch.arguments()
    keywords["old_logps"] = outputs["logps"]
    SEVEN["GRPO"]()(inputs, outputs, **keywords).loss.backward()
    expected = -reinforce_weights("GRPO", BATCH.mask) * BATCH.advantages[:, None]
    assert_same(batch.values["logps"].grad, expected)


@pytest.mark.parametrize("name", ["old_logps", "ref_logps", "sampler_logps", "advantages"])
def test_no_gradient_reaches_what_is_not_the_policy(name):
    inputs, outputs, keywords = BATCH.leaves().arguments()
    keywords[name] = keywords[name].clone().requires_grad_()
    every_term("GRPO")(inputs, outputs, **keywords).loss.backward()
    assert keywords[name].grad is None


def test_corrections_stop_the_gradient_on_policy_too():
    # rho = exp(sg(logp) - sampler) = 1.5; the gradient is that of -rho * r * A and not of rho itself
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    loss = PolicyLoss(correction=TruncatedWeight(high=2.0))
    sampler = logps.detach() - math.log(1.5)
    loss({"labels": torch.tensor([[1]])}, {"logps": logps}, advantages=[2.0], sampler_logps=sampler).loss.backward()
    assert logps.grad.item() == pytest.approx(-3.0)
