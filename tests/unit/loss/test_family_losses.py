"""Every named loss against `oracle`: value and both gradients, float64, padded and packed."""

import math
from dataclasses import replace

import pytest
import torch
from loss_batch import Batch, assert_same, value_and_grad
from oracle import Formula, oracle

from gruppo.loss import LOSSES, KeepWithin, MaskedWeight, TruncatedWeight, VESPOLoss

# name: (formula with the defaults, other keywords, what they change)
FAMILY = {
    "grpo": (Formula(aggregate="sequence_mean"), {"clip_range": (0.1, 0.3)}, {"clip": (0.1, 0.3)}),
    "gspo": (
        Formula(level="sequence_level", aggregate="sequence_mean"),
        {"clip_range": (0.01, 0.05)},
        {"clip": (0.01, 0.05)},
    ),
    "sapo": (Formula(surrogate="SoftGate", aggregate="sequence_mean"), {"tau": (1.0, 1.5)}, {"tau": (1.0, 1.5)}),
    "cispo": (Formula(surrogate="ClippedWeight"), {"clip_range": 0.5}, {"weight_cap": 1.5}),
    "bnpo": (Formula(aggregate="local_token_mean"), {"clip_range": 0.1}, {"clip": (0.1, 0.1)}),
    "drgrpo": (Formula(aggregate="ConstantLength"), {"max_completion_length": 7}, {"max_completion_length": 7}),
    "dapo": (Formula(n={"clip": (0.2, 0.28)}), {"clip_range": 0.1}, {"clip": (0.1, 0.1)}),
    "dual_clip": (Formula(surrogate="DualClip"), {"cap": 1.5}, {"cap": 1.5}),
    "two_sided": (Formula(surrogate="DualClip", n={"cap": 4.0}), {"delta": 1.3}, {"cap": 1.3}),
    "gspo_token": (
        Formula(level="sequence_token_level", aggregate="sequence_mean"),
        {"clip_range": 0.05},
        {"clip": (0.05, 0.05)},
    ),
    "gmpo": (
        Formula(level="ClippedMean", surrogate="PolicyGradient", aggregate="sequence_mean"),
        {"log_clip": (0.1, 0.2)},
        {"log_clip": (0.1, 0.2)},
    ),
    "luspo": (
        Formula(level="sequence_level", aggregate="sequence_mean_token_sum"),
        {"clip_range": 0.05},
        {"clip": (0.05, 0.05)},
    ),
    "vespo": (Formula(level="sequence_sum_level", surrogate="GammaWeight"), {}, {}),
    "dppo_tv": (
        Formula(surrogate="ClippedWeight", select="TVRegion", n={"weight_cap": 20.0}),
        {"region": (0.01, 0.03), "cap": 1.2},
        {"region": (0.01, 0.03), "weight_cap": 1.2},
    ),
    "dppo_kl": (
        Formula(surrogate="ClippedWeight", select="KLRegion", n={"weight_cap": 20.0}),
        {"region": (0.002, 0.01)},
        {"region": (0.002, 0.01)},
    ),
    "prime": (
        Formula(level="sampler_level", surrogate="PolicyGradient", select="TVRegion", pull=1e-3, n={"base": "sampler"}),
        {"region": (0.01, 0.03)},
        {"region": (0.01, 0.03)},
    ),
    "ipo": (
        Formula(
            level="sampler_level",
            surrogate="PolicyGradient",
            select="ProbabilityBand",
            pull=1e-3,
            n={"base": "sampler"},
        ),
        {"threshold": 0.02},
        {"band": 0.02},
    ),
    "m2po": (Formula(surrogate="PolicyGradient", select="SecondMoment"), {"threshold": 0.1}, {"moment": 0.1}),
    "decoupled_ppo": (
        Formula(correction="TruncatedWeight", n={"high": math.inf}),
        {"correction": TruncatedWeight(1.1)},
        {"high": 1.1},
    ),
    "top_entropy": (Formula(select="TopEntropy", n={"clip": (0.2, 0.28)}), {"share": 0.5}, {"share": 0.5}),
    "clip_cov": (
        Formula(select="ClipCovariance", n={"share": 2e-4}),
        {"share": 0.2, "bounds": (-0.5, 2.0), "seed": 3},
        {"share": 0.2, "cov": (-0.5, 2.0), "seed": 3},
    ),
    "kl_cov": (
        Formula(surrogate="PolicyGradient", terms="CovariancePenalty", n={"share": 2e-4}),
        {"share": 0.3, "coef": 0.5},
        {"share": 0.3, "coef": 0.5},
    ),
    "reinforce": (Formula(surrogate="LogProb", aggregate="sequence_mean_token_sum"), {}, {}),
    "gpg": (Formula(surrogate="LogProb"), {}, {}),
    "dro": (Formula(surrogate="LogProb", pull=0.05), {}, {}),
    "vapo": (Formula(nll_coef=0.1, n={"clip": (0.2, 0.28)}), {"clip_range": 0.1}, {"clip": (0.1, 0.1)}),
}


def log_probs(batch):
    """The batch with log-probs below 0, as a selection by probability expects."""
    names = ("logps", "old_logps", "ref_logps", "sampler_logps")
    return replace(batch, values=batch.values | {n: torch.nn.functional.logsigmoid(batch.values[n]) for n in names})


BATCHES = {
    "ragged": log_probs(Batch.random([6, 1, 4, 7, 2, 5], seed=21)),
    "far apart": log_probs(Batch.random([5, 3, 6], seed=22, spread=1.5)),
    "advantage per token": log_probs(Batch.random([5, 4, 3], seed=23, per_token_advantages=True)),
}


def expected(formula, batch):
    leaves = batch.leaves()
    value = oracle(formula, leaves.labels, leaves.values, leaves.advantages)
    value.backward()
    zero = torch.zeros_like(leaves.values["logps"])
    grads = [leaves.values[n].grad for n in ("logps", "entropies")]
    return value.detach(), *[zero if g is None else g for g in grads]


def test_every_named_loss_is_in_this_file():
    assert set(FAMILY) == set(LOSSES)


@pytest.mark.parametrize("layout", ["padded", "cu_seqlens [T]"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FAMILY)
def test_named_loss_agrees_with_its_formula(name, batch, layout):
    formula, _, _ = FAMILY[name]
    assert_same(value_and_grad(LOSSES[name](), BATCHES[batch], layout), expected(formula, BATCHES[batch]), 1e-11)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [n for n in FAMILY if FAMILY[n][1]])
def test_its_own_numbers_do_what_the_formula_says(name, batch):
    formula, keywords, numbers = FAMILY[name]
    formula = replace(formula, n=formula.n | numbers)
    assert_same(value_and_grad(LOSSES[name](**keywords), BATCHES[batch]), expected(formula, BATCHES[batch]), 1e-11)


@pytest.mark.parametrize("name", [n for n in FAMILY if FAMILY[n][1]])
def test_its_own_numbers_change_something(name):
    """Else the test above would compare a default with itself."""
    default, other = LOSSES[name](), LOSSES[name](**FAMILY[name][1])
    gaps = [(value_and_grad(default, b)[1] - value_and_grad(other, b)[1]).abs().max() for b in BATCHES.values()]
    assert max(gaps) > 1e-4


@pytest.mark.parametrize("name", FAMILY)
def test_shared_terms_are_added_to_every_loss(name):
    formula, _, _ = FAMILY[name]
    formula = replace(formula, beta=0.3, kl="ratio_k3", entropy_coef=0.02)
    loss = LOSSES[name](beta=0.3, kl_estimator="ratio_k3", entropy_coef=0.02)
    assert_same(value_and_grad(loss, BATCHES["ragged"]), expected(formula, BATCHES["ragged"]), 1e-11)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs_kl", "ratio_k1", "ratio_k3", "k3_straight_through"])
def test_every_kl_by_name(kl):
    formula = Formula(aggregate="sequence_mean", beta=0.5, kl=kl)
    loss = LOSSES["grpo"](beta=0.5, kl_estimator=kl)
    assert_same(value_and_grad(loss, BATCHES["ragged"]), expected(formula, BATCHES["ragged"]), 1e-11)


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2():
    value, grad, _ = value_and_grad(LOSSES["grpo"](beta=1.0, kl_estimator="k3_straight_through"), BATCHES["ragged"])
    assert value == value_and_grad(LOSSES["grpo"](beta=1.0, kl_estimator="k3"), BATCHES["ragged"])[0]
    assert_same(grad, value_and_grad(LOSSES["grpo"](beta=1.0, kl_estimator="k2"), BATCHES["ragged"])[1])


def test_the_correction_of_vespo_goes_into_the_product():
    formula = Formula(level="CorrectedSum", surrogate="GammaWeight")
    loss = VESPOLoss(correction=TruncatedWeight(2.0))
    assert loss.correction is None
    assert_same(value_and_grad(loss, BATCHES["ragged"]), expected(formula, BATCHES["ragged"]), 1e-11)


def test_vespo_refuses_a_weight_per_sequence_in_its_product():
    with pytest.raises(ValueError, match="one weight per token"):
        VESPOLoss(correction=MaskedWeight(level="sequence"))


def test_prime_loss_takes_a_mask_but_no_second_rho():
    assert LOSSES["prime"](correction=KeepWithin(0.5, 2.0)).needs == {"sampler_logps"}
    with pytest.raises(ValueError, match="over the sampler already"):
        LOSSES["prime"](correction=TruncatedWeight())


def test_gspo_token_has_the_gradient_of_gspo_for_one_advantage_per_sequence():
    """The paper's claim, with the clip inactive."""
    wide = {"clip_range": 50.0}
    ours, gspo = (value_and_grad(LOSSES[n](**wide), BATCHES["ragged"]) for n in ("gspo_token", "gspo"))
    assert_same(ours, gspo)


def test_luspo_is_gspo_times_the_length():
    # one row of three tokens with d = ln 1.1 each, A = 2: s = 1.1, loss = -1.1 * 2 * 3
    labels, logps = torch.tensor([[4, 5, 6]]), torch.full((1, 3), -1.0, dtype=torch.float64)
    old = logps - math.log(1.1)
    out = LOSSES["luspo"]()({"labels": labels}, {"logps": logps}, advantages=[2.0], old_logps=old)
    assert out.loss.item() == pytest.approx(-6.6)


def test_m2po_by_hand():
    # (log r)^2 of the outward tokens: 0.01, 0.04, 0.25. Means from the smallest: 0.01, 0.025, 0.1: the last goes
    gaps = torch.tensor([[0.1, 0.2, 0.5, -0.9]], dtype=torch.float64)  # the last moves inward: never judged
    logps = torch.full((1, 4), -2.0, dtype=torch.float64)
    out = LOSSES["m2po"]()(
        {"labels": torch.ones(1, 4, dtype=torch.int64)}, {"logps": logps}, advantages=[1.0], old_logps=logps - gaps
    )
    assert out.loss.item() == pytest.approx(-(math.exp(0.1) + math.exp(0.2) + math.exp(-0.9)) / 4)


def test_nll_is_a_mean_over_the_tokens_that_went_well():
    # ratio 1: policy = -mean A = -(1 + 1 - 2) / 3 = 0; nll = (0.5 + 1.5) / 2
    logps = torch.tensor([[-0.5, -1.5], [-9.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1, 2], [3, -100]])
    out = LOSSES["vapo"](nll_coef=0.2)({"labels": labels}, {"logps": logps}, advantages=[1.0, -2.0])
    assert out.loss.item() == pytest.approx(0.2 * 1.0)
    assert out.terms["nll"].item() == pytest.approx(1.0)
