"""Agreement with `naive_loss` over random shapes, masks, layouts and options: loss and both gradients, in float64."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batch import LAYOUTS, SEVEN, Batch, assert_same, seven_losses
from naive_loss import Counts, Spec, naive_loss, named

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

CORRECTIONS = {
    None: None,
    ("truncated", 0.0, 1.3): TruncatedWeight(high=1.3),
    ("truncated", 0.7, 2.0): TruncatedWeight(high=2.0, low=0.7),
    ("masked", 0.6, 1.5, "token"): MaskedWeight(0.6, 1.5),
    ("masked", 0.8, 1.3, "sequence"): MaskedWeight(0.8, 1.3, "sequence"),
}


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
    """Numbers of a Spec that every loss takes."""
    return st.fixed_dictionaries(
        {
            "beta": st.sampled_from([0.0, 0.04, 1.0]),
            "kl": st.integers(0, 3),
            "entropy_coef": st.sampled_from([0.0, 0.01, -0.5]),
            "correction": st.sampled_from(list(CORRECTIONS)),
        }
    )


def assert_agrees(loss, spec, case):
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
    arguments = dict(batch.values)
    if on_policy:
        arguments["old_logps"] = None
    expected = naive_loss(spec, batch.mask, **arguments, advantages=batch.advantages, counts=counts)
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
def test_named_loss_agrees_with_the_naive_one(name, case, numbers, clip):
    spec = named(name, **numbers, low=clip[0], high=clip[1])
    own = {}
    if name == "SAPO":
        spec = replace(spec, tau=(1.0, 1.05))
        own = {"tau": (1.0, 1.05)}
    if name == "DRGRPO":
        spec = replace(spec, max_completion_length=7)
        own = {"max_completion_length": 7}
    loss = SEVEN[name](
        clip_range=clip,
        beta=numbers["beta"],
        kl_estimator=numbers["kl"],
        entropy_coef=numbers["entropy_coef"],
        correction=CORRECTIONS[numbers["correction"]],
        **own,
    )
    assert_agrees(loss, spec, case)


LEVELS = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
    "sequence_sum": sequence_sum_level,
}
SURROGATES = {
    "clip": Clip(0.2, 0.3),
    "dual_clip": DualClip(0.2, 0.3, 2.0),
    "clipped_weight": ClippedWeight(0.3),
    "soft_gate": SoftGate(1.0, 2.0),
    "policy_gradient": PolicyGradient(),
    "gamma_weight": GammaWeight(),
}
AGGREGATES = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "local_token_mean": local_token_mean,
    "constant_length": ConstantLength(6),
    "sequence_mean_token_sum": sequence_mean_token_sum,
}


@given(
    case=cases(),
    numbers=options(),
    level=st.sampled_from(list(LEVELS)),
    surrogate=st.sampled_from(list(SURROGATES)),
    aggregate=st.sampled_from(list(AGGREGATES)),
)
@settings(max_examples=120)
def test_any_composition_agrees_with_the_naive_one(case, numbers, level, surrogate, aggregate):
    spec = Spec(
        level=level,
        surrogate=surrogate,
        aggregate=aggregate,
        low=0.2,
        high=0.3,
        cap=2.0,
        tau=(1.0, 2.0),
        max_completion_length=6,
        **numbers,
    )
    loss = PolicyLoss(
        level=LEVELS[level],
        surrogate=SURROGATES[surrogate],
        aggregate=AGGREGATES[aggregate],
        kl=(k1, k2, k3, ratio_k1)[numbers["kl"]],
        correction=CORRECTIONS[numbers["correction"]],
        beta=numbers["beta"],
        entropy_coef=numbers["entropy_coef"],
    )
    assert_agrees(loss, spec, case)
