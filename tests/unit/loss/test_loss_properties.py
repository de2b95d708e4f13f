"""Agreement with `oracle` over random shapes, masks, layouts and options: loss and both gradients, in float64."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batch import LAYOUTS, SEVEN, Batch, assert_same, seven_losses
from oracle import Counts, Formula, oracle
from test_family_losses import FAMILY

from gruppo.batch import Totals
from gruppo.loss import (
    Clip,
    ClippedWeight,
    ConstantLength,
    DualClip,
    GammaWeight,
    MaskedWeight,
    PolicyGradient,
    PolicyLoss,
    SoftGate,
    TruncatedWeight,
    k1,
    k2,
    k3,
    local_token_mean,
    ratio_k1,
    sequence_level,
    sequence_mean,
    sequence_mean_token_sum,
    sequence_sum_level,
    sequence_token_level,
    token_level,
    token_mean,
)

# The part, and what the oracle calls it with which numbers
CORRECTIONS = [
    (None, "none", {}),
    (TruncatedWeight(high=1.3), "TruncatedWeight", {"high": 1.3}),
    (TruncatedWeight(high=2.0, low=0.7), "TruncatedWeight", {"high": 2.0, "low": 0.7}),
    (MaskedWeight(0.6, 1.5), "MaskedWeight", {"rho": (0.6, 1.5)}),
    (MaskedWeight(0.8, 1.3, "sequence"), "MaskedWeight sequence", {"rho": (0.8, 1.3)}),
]
KL = (k1, k2, k3, ratio_k1)


@st.composite
def cases(draw):
    """(batch, layout, trailing padding, counts or None, on-policy)"""
    slots = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    layout = draw(st.sampled_from(LAYOUTS))
    mask = [draw(st.lists(st.booleans(), min_size=max(slots), max_size=max(slots))) for _ in slots]
    if layout.startswith("positions"):  # an unscored slot at position 0 alone is padding there, not a sequence
        mask = [[True, *row[1:]] if n == 1 else row for row, n in zip(mask, slots, strict=True)]
    batch = Batch.random(
        slots,
        mask,
        seed=draw(st.integers(0, 10_000)),
        spread=draw(st.sampled_from([0.05, 0.5, 8.0])),
        per_token_advantages=draw(st.booleans()),
    )
    tokens = int(batch.mask.sum())
    counts = draw(
        st.sampled_from([None, Counts(9, tokens + 7, max(tokens, 1) + 2, 0.25), Counts(4, tokens + 1, tokens + 1)])
    )
    if tokens == 0 and counts is None:
        counts = Counts(3, 5, 5)
    return batch, layout, draw(st.sampled_from([0, 2])) if layout != "padded" else 0, counts, draw(st.booleans())


def options():
    """What every loss takes."""
    return st.fixed_dictionaries(
        {
            "beta": st.sampled_from([0.0, 0.04, 1.0]),
            "kl": st.integers(0, 3),
            "entropy_coef": st.sampled_from([0.0, 0.01, -0.5]),
            "correction": st.sampled_from(CORRECTIONS),
        }
    )


def assert_agrees(loss, formula, case):
    batch, layout, trailing, counts, on_policy = case
    batch = batch.leaves()
    inputs, outputs, keywords = batch.arguments(layout, trailing)
    totals = None
    if counts is not None:
        totals = Totals(
            sequences=counts.sequences,
            tokens=counts.tokens,
            local_tokens=counts.local_tokens,
            local_share=counts.local_share,
        )
    if on_policy:
        keywords["old_logps"] = None
    value = loss(inputs, outputs, totals=totals, **keywords).loss
    values = {name: v for name, v in batch.values.items() if not (on_policy and name == "old_logps")}
    expected = oracle(formula, batch.labels, values, batch.advantages, counts)
    leaves = [batch.values["logps"], batch.values["entropies"]]
    got_grads, expected_grads = (
        [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
        for grads in (gradients(value, leaves), gradients(expected, leaves))
    )
    assert_same([value.detach(), *got_grads], [expected.detach(), *expected_grads], tolerance=1e-11)


def gradients(value, leaves):
    return torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)


@seven_losses
@given(case=cases(), numbers=options(), clip=st.sampled_from([(0.2, 0.2), (0.1, 0.5), (3e-4, 4e-4)]))
@settings(max_examples=25)
def test_named_loss_agrees_with_the_oracle(name, case, numbers, clip):
    own = {"SAPO": {"tau": (1.0, 1.05)}, "DRGRPO": {"max_completion_length": 7}}.get(name, {})
    plain, _, _ = FAMILY[name.lower()]
    formula = shared(plain, numbers, {"clip": clip, "weight_cap": 1 + clip[1], **own})
    correction, _, _ = numbers["correction"]
    loss = SEVEN[name](
        clip_range=clip,
        beta=numbers["beta"],
        kl_estimator=numbers["kl"],
        entropy_coef=numbers["entropy_coef"],
        correction=correction,
        **own,
    )
    assert_agrees(loss, formula, case)


def shared(formula, numbers, own):
    """The formula with the numbers that every loss takes, and those of its parts."""
    _, correction, bounds = numbers["correction"]
    return replace(
        formula,
        beta=numbers["beta"],
        kl=KL[numbers["kl"]].__name__,
        entropy_coef=numbers["entropy_coef"],
        correction=correction,
        n=formula.n | own | bounds,
    )


PARTS = {
    "level": [token_level, sequence_level, sequence_token_level, sequence_sum_level],
    "surrogate": [
        Clip(0.2, 0.3),
        DualClip(0.2, 0.3, 2.0),
        ClippedWeight(0.3),
        SoftGate(1.0, 2.0),
        PolicyGradient(),
        GammaWeight(),
    ],
    "aggregate": [sequence_mean, token_mean, local_token_mean, ConstantLength(6), sequence_mean_token_sum],
}
NUMBERS = {"clip": (0.2, 0.3), "cap": 2.0, "weight_cap": 1.3, "tau": (1.0, 2.0), "max_completion_length": 6}


@given(
    case=cases(),
    numbers=options(),
    parts=st.fixed_dictionaries({kind: st.sampled_from(parts) for kind, parts in PARTS.items()}),
)
@settings(max_examples=120)
def test_any_composition_agrees_with_the_oracle(case, numbers, parts):
    names = {kind: getattr(part, "__name__", type(part).__name__) for kind, part in parts.items()}
    correction, _, _ = numbers["correction"]
    loss = PolicyLoss(
        **parts,
        kl=KL[numbers["kl"]],
        correction=correction,
        beta=numbers["beta"],
        entropy_coef=numbers["entropy_coef"],
    )
    assert_agrees(loss, shared(Formula(**names), numbers, NUMBERS), case)
