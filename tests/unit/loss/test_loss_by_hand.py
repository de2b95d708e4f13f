"""Values and gradients that can be checked with a pencil: two sequences of 2 + 1 tokens, then the parts one by one."""

import math

import pytest
import torch

from gruppo.batch import Totals
from gruppo.loss import (
    LOSSES,
    BNPOLoss,
    CISPOLoss,
    Clip,
    ConstantLength,
    DAPOLoss,
    DRGRPOLoss,
    DualClip,
    GammaWeight,
    GRPOLoss,
    GSPOLoss,
    MaskedWeight,
    PolicyGradient,
    PolicyLoss,
    SAPOLoss,
    TruncatedWeight,
    local_token_mean,
    ratio_k3,
    sequence_mean_token_sum,
    sequence_sum_level,
    token_mean,
)

# Slot 0 is a prompt in both rows, and the last slot of row 1 is padding.
LABELS = torch.tensor([[-100, 7, 8], [-100, 9, -100]])
LOGPS = [-1.0, -2.0, -0.5]  # of the tokens 7, 8 | 9
ADVANTAGES = [1.0, -2.0]
LN3 = math.log(3)


def rows(values):
    """Three numbers, one per scored token, at their slots."""
    return torch.zeros(2, 3, dtype=torch.float64).masked_scatter(
        LABELS != -100, torch.tensor(values, dtype=torch.float64)
    )


def run(loss, ratios, advantages=ADVANTAGES, **keywords):
    """(loss, gradient of the three tokens) with old_logps such that the ratios are these."""
    logps = rows(LOGPS).requires_grad_()
    old = rows([x - math.log(r) for x, r in zip(LOGPS, ratios, strict=True)])
    result = loss({"labels": LABELS}, {"logps": logps}, advantages=advantages, old_logps=old, **keywords)
    result.loss.backward()
    return result.loss.item(), logps.grad[LABELS != -100].tolist()


# Ratios 1.62, 0.5 | 1.1 and advantages +1 | -2. The clip at 0.2 gives the token losses
#     -min(1.62, 1.2) = -1.2     -min(0.5, 0.8) = -0.5     -min(1.1 * -2, 1.1 * -2) = 2.2
# whose derivative by the log-prob is r * d/dr: 0 where clipped, -0.5 and 2.2.
RATIOS = [1.62, 0.5, 1.1]
BY_HAND = {
    # ((-1.2 - 0.5) / 2 + 2.2) / 2 = 0.675; weights 1/4, 1/4, 1/2
    "GRPO": (GRPOLoss(), RATIOS, 0.675, [0.0, -0.125, 1.1]),
    # s = sqrt(1.62 * 0.5) = 0.9: (-0.9 + 2.2) / 2 = 0.65; each of the two tokens gets -0.9 / 2 / 2
    "GSPO": (GSPOLoss(), RATIOS, 0.65, [-0.225, -0.225, 1.1]),
    # tau (1, 2). sigmoid(ln 3) = 3/4 and sigmoid(0) = 1/2, so with r = 1 + ln 3, 1 | 1 + ln(3) / 2:
    #     -4 * 3/4 = -3     -4 * 1/2 = -2     4/2 * 3/4 * 2 = 3     and ((-3 - 2) / 2 + 3) / 2 = 0.25
    # the derivative is -4 * gate * (1 - gate) * r * A
    "SAPO": (
        SAPOLoss(tau=(1.0, 2.0)),
        [1 + LN3, 1.0, 1 + LN3 / 2],
        0.25,
        [-4 * 3 / 16 * (1 + LN3) / 4, -4 / 4 / 4, 4 * 3 / 16 * (1 + LN3 / 2) * 2 / 2],
    ),
    # -(1.2 * 1 * -1 + 0.5 * 1 * -2 + 1.1 * -2 * -0.5) / 3 = 1.1 / 3; the derivative is -weight * A / 3
    "CISPO": (CISPOLoss(), RATIOS, 1.1 / 3, [-0.4, -0.5 / 3, 2.2 / 3]),
    # (-1.2 - 0.5 + 2.2) / 3 tokens
    "BNPO": (BNPOLoss(), RATIOS, 0.5 / 3, [0.0, -0.5 / 3, 2.2 / 3]),
    # (-1.2 - 0.5 + 2.2) / (2 sequences * 4)
    "DRGRPO": (DRGRPOLoss(max_completion_length=4), RATIOS, 0.0625, [0.0, -0.0625, 0.275]),
    # clip-higher: (-1.28 - 0.5 + 2.2) / 3 tokens
    "DAPO": (DAPOLoss(), RATIOS, 0.14, [0.0, -0.5 / 3, 2.2 / 3]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_value_by_hand(name):
    loss, ratios, expected, _ = BY_HAND[name]
    assert run(loss, ratios)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_gradient_by_hand(name):
    loss, ratios, _, expected = BY_HAND[name]
    assert run(loss, ratios)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_policy_term_is_the_loss_when_there_is_no_other_term(name):
    loss, ratios, expected, _ = BY_HAND[name]
    old = rows([x - math.log(r) for x, r in zip(LOGPS, ratios, strict=True)])
    result = loss({"labels": LABELS}, {"logps": rows(LOGPS)}, advantages=ADVANTAGES, old_logps=old)
    assert {k: v.item() for k, v in result.terms.items()} == pytest.approx({"policy": expected}, abs=1e-12)


def test_both_sides_of_the_clip():
    # A > 0 is cut above 1.2 only and A < 0 below 0.8 only: -1.2, -0.5 | -min(0.7 * -2, 0.8 * -2) = 1.6
    value, grad = run(GRPOLoss(), [1.62, 0.5, 0.7])
    assert (value, grad) == (pytest.approx(((-1.2 - 0.5) / 2 + 1.6) / 2), pytest.approx([0.0, -0.125, 0.0]))


def test_asymmetric_clip_range_has_its_own_bound_on_each_side():
    # bounds 0.9 and 1.5: -1.5, -0.5 | -min(0.7 * -2, 0.9 * -2) = 1.8
    value, _ = run(GRPOLoss(clip_range=(0.1, 0.5)), [1.62, 0.5, 0.7])
    assert value == pytest.approx(((-1.5 - 0.5) / 2 + 1.8) / 2)


def test_cispo_has_no_lower_bound():
    # A weight of 0.01 stays 0.01: the gradient is -0.01 * A / 3 for the second token
    assert run(CISPOLoss(), [1.0, 0.01, 1.0])[1] == pytest.approx([-1 / 3, -0.01 / 3, 2 / 3])


def test_sapo_ignores_clip_range():
    assert run(SAPOLoss(clip_range=0.01), RATIOS) == run(SAPOLoss(clip_range=0.9), RATIOS)


def test_one_tau_serves_both_signs():
    assert run(SAPOLoss(tau=2.0), RATIOS) == run(SAPOLoss(tau=(2.0, 2.0)), RATIOS)


def test_per_token_advantages_weigh_single_tokens():
    # r*A for A = 1, -1 | 3 within the clip: -(1 * 1.1) , +1.0 | -(3 * 0.9)
    value, grad = run(GRPOLoss(), [1.1, 1.0, 0.9], advantages=rows([1.0, -1.0, 3.0]))
    assert value == pytest.approx(((-1.1 + 1.0) / 2 - 2.7) / 2)
    assert grad == pytest.approx([-1.1 / 4, 1.0 / 4, -2.7 / 2])


def test_totals_of_the_step_replace_the_counts_of_the_batch():
    # The step has 4 sequences and 10 tokens, so GRPO halves and DAPO takes 3/10 of what the batch alone would give.
    totals = Totals(sequences=4, tokens=10)
    assert run(GRPOLoss(), RATIOS, totals=totals)[0] == pytest.approx(0.675 / 2)
    assert run(DAPOLoss(), RATIOS, totals=totals)[0] == pytest.approx(0.14 * 3 / 10)
    assert run(DRGRPOLoss(max_completion_length=4), RATIOS, totals=totals)[0] == pytest.approx(0.0625 / 2)


# --- KL: one token with logp - ref = ln 2 and ratio 1.1, A = 0 ------------------------------------------------------

LN2 = math.log(2)
KL_BY_HAND = {
    0: (LN2, 1.0),  # d
    1: (LN2**2 / 2, LN2),  # d^2 / 2
    2: (0.5 - 1 + LN2, 0.5),  # e^-d - 1 + d, derivative 1 - e^-d
    3: (1.1 * LN2, 1.1 * LN2 + 1.1),  # r * d, derivative r * d + r
    ratio_k3: (1.1 * (LN2 - 0.5), 1.1 * (LN2 - 0.5) + 1.1 * 0.5),
}


@pytest.mark.parametrize("estimator", KL_BY_HAND)
def test_kl_by_hand(estimator):
    value, slope = KL_BY_HAND[estimator]
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    result = GRPOLoss(beta=0.5, kl_estimator=estimator)(
        {"labels": torch.tensor([[4]])},
        {"logps": logps},
        advantages=[0.0],
        old_logps=logps.detach() - math.log(1.1),
        ref_logps=logps.detach() - LN2,
    )
    result.loss.backward()
    assert result.terms["kl"].item() == pytest.approx(value, abs=1e-12)
    assert result.loss.item() == pytest.approx(0.5 * value, abs=1e-12)
    assert logps.grad.item() == pytest.approx(0.5 * slope, abs=1e-12)


def test_k3_is_exact_for_a_tiny_difference():
    # e^-d - 1 + d = d^2 / 2 to first order; written as exp(-d) - 1 it would be 0 in float32 for d = 1e-4
    logps = torch.tensor([[-1.0]])
    out = GRPOLoss(beta=1.0)(
        {"labels": torch.tensor([[4]])}, {"logps": logps}, advantages=[0.0], ref_logps=logps - 1e-4
    )
    assert out.loss.item() == pytest.approx(0.5e-8, rel=0.05)


def test_entropy_bonus_by_hand():
    # sequence mean of 0.3, 0.6 | 0.9 is (0.45 + 0.9) / 2 = 0.675, here times 0.1
    entropies = rows([0.3, 0.6, 0.9]).requires_grad_()
    outputs = {"logps": rows(LOGPS), "entropies": entropies}
    result = GRPOLoss(entropy_coef=0.1)({"labels": LABELS}, outputs, advantages=[0.0, 0.0])
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-0.0675)
    assert result.terms["entropy"].item() == pytest.approx(0.675)
    assert entropies.grad[LABELS != -100].tolist() == pytest.approx([-0.025, -0.025, -0.05])


# --- parts ---------------------------------------------------------------------------------------------------------


def one_token(surrogate, ratio, advantage):
    """(loss, gradient) of one token with logp -2."""
    logps = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    old = logps.detach() - math.log(ratio)
    loss = PolicyLoss(surrogate=surrogate)
    value = loss({"labels": torch.tensor([[4]])}, {"logps": logps}, advantages=[advantage], old_logps=old).loss
    value.backward()
    return value.item(), logps.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "grad"),
    [
        (5.0, -2.0, 6.0, 0.0),  # Clip would give 10; capped at 3 * 2
        (2.0, -2.0, 4.0, 4.0),  # below the cap: as Clip
        (0.5, -2.0, 1.6, 0.0),  # clipped low: 0.8 * 2
        (5.0, 1.0, -1.2, 0.0),  # the cap is for A < 0 only
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, value, grad):
    assert one_token(DualClip(cap=3.0), ratio, advantage) == pytest.approx((value, grad), abs=1e-12)


@pytest.mark.parametrize(("ratio", "advantage"), [(5.0, -2.0), (0.01, 3.0), (1.0, 1.0)])
def test_policy_gradient_is_the_ratio_times_the_advantage(ratio, advantage):
    expected = -ratio * advantage
    assert one_token(PolicyGradient(), ratio, advantage) == pytest.approx((expected, expected), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.0, 2.0, 1.0),  # phi(1) = 1 on both sides
        (1.0, -2.0, 1.0),
        (2.0, 1.0, 4 * math.exp(-3)),  # k, l = 2, 3: e^3 * 2^2 * e^-6
        (2.0, -1.0, 8 * math.exp(-2)),  # k, l = 3, 2: e^2 * 2^3 * e^-4
    ],
)
def test_gamma_weight_by_hand(ratio, advantage, weight):
    # -weight * A * logp with logp = -2, and -weight * A
    expected = (2 * weight * advantage, -weight * advantage)
    assert one_token(GammaWeight(), ratio, advantage) == pytest.approx(expected, abs=1e-12)


def test_sequence_sum_level_multiplies_the_ratios():
    # 1.5 * 0.5 = 0.75 for both tokens of row 0: ((-0.75 - 0.75) / 2 + 2.2) / 2; the derivative reaches both tokens
    value, grad = run(PolicyLoss(level=sequence_sum_level, surrogate=PolicyGradient()), [1.5, 0.5, 1.1])
    assert value == pytest.approx((-0.75 + 2.2) / 2)
    assert grad == pytest.approx([-0.75 / 2, -0.75 / 2, 1.1])


def test_sequence_mean_token_sum_does_not_divide_by_the_length():
    # (-1.2 - 0.5 + 2.2) / 2 sequences
    assert run(PolicyLoss(aggregate=sequence_mean_token_sum), RATIOS)[0] == pytest.approx(0.25)


def test_constant_length_divides_by_sequences_times_the_constant():
    assert run(PolicyLoss(aggregate=ConstantLength(10)), RATIOS)[0] == pytest.approx(0.5 / 20)


def test_local_token_mean_takes_its_share_of_the_step():
    totals = Totals(sequences=9, tokens=99, local_tokens=3, local_share=0.25)
    assert run(PolicyLoss(aggregate=local_token_mean), RATIOS, totals=totals)[0] == pytest.approx(0.5 / 3 / 4)


# old - sampler = ln 3, ln 1.5 | ln 0.25, ratio 1, so the token losses are -1, -1 | 2 times the weight
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedWeight(high=2.0), [2.0, 1.5, 0.25]),
        (TruncatedWeight(high=2.0, low=0.5), [2.0, 1.5, 0.5]),
        (MaskedWeight(0.5, 2.0), [0.0, 1.5, 0.0]),
        (MaskedWeight(0.5, 3.5), [3.0, 1.5, 0.0]),
        # geometric mean of 3 and 1.5 is sqrt(4.5) = 2.12: kept whole; 0.25 is dropped whole
        (MaskedWeight(0.5, 2.5, level="sequence"), [math.sqrt(4.5), math.sqrt(4.5), 0.0]),
        (MaskedWeight(0.5, 2.0, level="sequence"), [0.0, 0.0, 0.0]),
    ],
)
def test_correction_weighs_the_policy_term(correction, weights):
    sampler = rows([x - math.log(w) for x, w in zip(LOGPS, [3.0, 1.5, 0.25], strict=True)])
    loss = PolicyLoss(aggregate=token_mean, correction=correction)
    value, grad = run(loss, [1.0, 1.0, 1.0], sampler_logps=sampler)
    assert value == pytest.approx((-weights[0] - weights[1] + 2 * weights[2]) / 3)
    assert grad == pytest.approx([-weights[0] / 3, -weights[1] / 3, 2 * weights[2] / 3])


def test_correction_does_not_touch_the_kl():
    loss = PolicyLoss(correction=MaskedWeight(0.5, 2.0), beta=1.0)
    sampler, ref = rows(LOGPS) - math.log(9), rows(LOGPS) - LN2  # every weight is 0, every delta ln 2
    value, _ = run(loss, [1.0, 1.0, 1.0], sampler_logps=sampler, ref_logps=ref)
    assert value == pytest.approx(LN2 - 0.5)


def test_correction_bounds_the_log_weight_at_ten():
    sampler = rows(LOGPS) - 50.0
    value, _ = run(PolicyLoss(correction=TruncatedWeight(high=1e9)), [1.0, 1.0, 1.0], [1.0, 1.0], sampler_logps=sampler)
    assert value == pytest.approx(-math.exp(10))


def test_a_function_can_be_a_part():
    def squared(log_ratio, inputs):
        """(r - 1)^2 * A"""
        return log_ratio.expm1().square() * inputs.advantages

    # 0.5^2 * 1, 0.5^2 * 1 | 0.1^2 * -2
    loss = PolicyLoss(surrogate=squared, aggregate=token_mean)
    assert run(loss, [1.5, 0.5, 1.1])[0] == pytest.approx((0.25 + 0.25 - 0.02) / 3)
    assert "(r - 1)^2 * A" in repr(loss)


def test_functions_can_be_all_parts():
    loss = PolicyLoss(
        level=lambda inputs: inputs.logps * 0 + LN2,
        surrogate=lambda log_ratio, inputs: log_ratio.exp() * inputs.advantages,
        kl=lambda delta, log_ratio: delta**4,
        aggregate=lambda segments, totals: torch.full((segments.num_sequences,), 0.5),
        correction=lambda inputs: inputs.sampler_logps,
        beta=1.0,
    )
    # 0.5 * (2 * A * sampler + 1^4) over A = 1, 1 | -2 and sampler = 3, 4 | 5: 0.5 * (6 + 8 - 20 + 3)
    value, _ = run(loss, RATIOS, sampler_logps=rows([3.0, 4.0, 5.0]), ref_logps=rows(LOGPS) - 1.0)
    assert value == pytest.approx(-1.5)


# --- what a loss says of itself -------------------------------------------------------------------------------------

FORMULAS = {
    GRPOLoss(): ["r_t = exp(logp_t - old_t)", "-min(r*A, clip(r, 0.8, 1.2)*A)", "mean over sequences of the mean over"],
    GSPOLoss(clip_range=(3e-4, 4e-4)): ["s = exp(mean_t(logp_t - old_t))", "clip(r, 0.9997, 1.0004)"],
    SAPOLoss(tau=(1.0, 1.05)): ["-(4/tau)*sigmoid(tau*(r - 1))*A", "tau = 1 if A > 0 else 1.05"],
    CISPOLoss(): ["-sg(min(r, 1.2))*A*logp", "mean over all tokens of the step"],
    BNPOLoss(): ["-min(r*A, clip(r, 0.8, 1.2)*A)", "mean over the tokens of the local batch"],
    DRGRPOLoss(max_completion_length=77): ["sum over tokens / (sequences * 77)"],
    DAPOLoss(): ["clip(r, 0.8, 1.28)", "mean over all tokens of the step"],
    PolicyLoss(surrogate=DualClip()): ["-min(r*A, clip(r, 0.8, 1.2)*A), and at most -3*A where A < 0"],
    PolicyLoss(surrogate=PolicyGradient()): ["-r*A"],
    PolicyLoss(surrogate=GammaWeight()): ["-sg(e^l*w^k*e^(-l*w))*A*logp"],
    GRPOLoss(beta=0.04): ["+ 0.04 * kl_t", "k3 = exp(-delta) - 1 + delta", "delta = logp - ref"],
    GRPOLoss(beta=0.04, kl_estimator=3): ["r * delta"],
    GRPOLoss(entropy_coef=0.01): ["- 0.01 * entropy_t"],
    GRPOLoss(correction=TruncatedWeight()): ["* correction_t", "clip(rho, 0, 2), rho = exp(old - sampler)"],
    GRPOLoss(correction=MaskedWeight(level="sequence")): ["in [0.5, 5], else 0", "exp(mean_t(old - sampler))"],
}


@pytest.mark.parametrize("loss", FORMULAS, ids=lambda loss: repr(loss).splitlines()[0])
def test_repr_prints_the_formula(loss):
    text = repr(loss)
    assert text.startswith(f"{type(loss).__name__}: loss = sum_t weight_t * (")
    assert [f for f in FORMULAS[loss] if f not in text] == []


def test_repr_leaves_out_what_is_switched_off():
    assert [word for word in ("kl", "entropy", "correction") if word in repr(GRPOLoss())] == []


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"beta": 0.1}, {"ref_logps"}),
        ({"entropy_coef": 0.1}, {"entropies"}),
        ({"correction": TruncatedWeight()}, {"sampler_logps"}),
        (
            {"beta": 0.1, "entropy_coef": 0.1, "correction": MaskedWeight()},
            {"ref_logps", "entropies", "sampler_logps"},
        ),
    ],
)
def test_needs_names_the_optional_inputs(options, needs):
    assert GRPOLoss(**options).needs == needs


def test_clip_range_of_a_composed_loss_is_that_of_its_surrogate():
    assert PolicyLoss(surrogate=Clip(0.1, 0.3)).clip_range == (0.1, 0.3)
    assert PolicyLoss(surrogate=DualClip(0.1, 0.3)).clip_range == (0.1, 0.3)
    assert PolicyLoss(surrogate=PolicyGradient()).clip_range is None


def test_on_policy_is_reported():
    inputs, outputs = {"labels": LABELS}, {"logps": rows(LOGPS)}
    assert GRPOLoss()(inputs, outputs, advantages=ADVANTAGES).on_policy is True
    assert GRPOLoss()(inputs, outputs, advantages=ADVANTAGES, old_logps=rows(LOGPS)).on_policy is False


@pytest.mark.parametrize("name", ["grpo", "dapo", "drgrpo", "luspo", "reinforce", "bnpo"])
def test_the_mean_of_the_kl_is_per_token_whatever_the_loss(name: str) -> None:
    """Completions of 300 and 100 tokens with delta = 0.1 and 0.3. By hand: k3 = exp(-d) - 1 + d is 0.0048374 and
    0.0408182, and (300 * 0.0048374 + 100 * 0.0408182) / 400 = 0.0138326."""
    options = {"max_completion_length": 4096} if name == "drgrpo" else {}
    labels = torch.zeros(2, 300, dtype=torch.int64)
    labels[1, 100:] = -100
    logps = torch.full((2, 300), -1.0).requires_grad_()
    ref_logps = torch.tensor([[-1.1], [-1.3]]).expand(2, 300)
    made = LOSSES[name](beta=0.1, **options)
    given = {"advantages": [0.0, 0.0], "old_logps": logps.detach()}
    output = made({"labels": labels}, {"logps": logps}, ref_logps=ref_logps, **given)
    assert output.means["kl"].item() == pytest.approx(0.0138326, rel=1e-4)
    own = {"grpo": (0.0048374 + 0.0408182) / 2, "luspo": None, "drgrpo": 0.0138326 * 400 / (2 * 4096)}.get(name)
    if own is not None:
        assert output.terms["kl"].item() == pytest.approx(own, rel=1e-4)
    # The shares of two parts of a step add up to it.
    totals = Totals(sequences=2, tokens=400)
    parts = [
        made(
            {"labels": labels[i : i + 1]},
            {"logps": logps[i : i + 1]},
            advantages=[0.0],
            old_logps=logps[i : i + 1].detach(),
            ref_logps=ref_logps[i : i + 1],
            totals=totals,
        )
        for i in range(2)
    ]
    assert sum(part.means["kl"].item() for part in parts) == pytest.approx(0.0138326, rel=1e-4)
