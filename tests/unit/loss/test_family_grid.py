"""Every part with every other: agrees with `oracle`, and no split, order or layout shows; or is refused."""

import itertools
import random

import pytest
import torch
from catalogue import PARTS, refused_pairs
from loss_batch import Batch, assert_same, value_and_grad
from oracle import Formula
from test_family_losses import expected, log_probs

from gruppo import loss as gl
from gruppo.errors import InputError

STEP = log_probs(Batch.random([6, 1, 4, 7, 2, 5], seed=31, spread=0.6))
TINY = log_probs(Batch.random([4, 3, 2], seed=32, spread=0.5))

# The catalogue's parts with numbers that bite on a step of 20 tokens, and what the oracle calls them
NUMBERS = {
    "clip": (0.15, 0.25),
    "cap": 1.4,
    "weight_cap": 1.3,
    "tau": (1.0, 1.5),
    "log_clip": (0.3, 0.2),
    "max_completion_length": 5,
    "high": 1.3,
    "rho": (0.7, 1.4),
    "opsm": 0.05,
    "share": 0.3,
    "cov": (-0.4, 1.5),
    "seed": 5,
    "coef": 0.7,
    "moment": 0.15,
    "budget": 0.2,
    "region": (0.01, 0.02),
    "band": 0.03,
}
TRUNCATED = gl.TruncatedWeight(1.3)
MADE = {
    "level": {"CorrectedSum": gl.CorrectedSum(gl.TruncatedWeight(2.0)), "ClippedMean": gl.ClippedMean(0.3, 0.2)},
    "surrogate": {
        "Clip": gl.Clip(0.15, 0.25),
        "DualClip": gl.DualClip(0.15, 0.25, 1.4),
        "ClippedWeight": gl.ClippedWeight(0.3),
        "SoftGate": gl.SoftGate(1.0, 1.5),
    },
    "aggregate": {"ConstantLength": gl.ConstantLength(5)},
    "correction": {
        "TruncatedWeight": TRUNCATED,
        "TruncatedWeight sequence_sum": gl.TruncatedWeight(1.3, level="sequence_sum"),
        "MaskedWeight": gl.MaskedWeight(0.7, 1.4),
        "MaskedWeight sequence": gl.MaskedWeight(0.7, 1.4, "sequence"),
        "MaskedWeight sequence_sum": gl.MaskedWeight(0.7, 1.4, "sequence_sum"),
        "KeepWithin": gl.KeepWithin(0.7, 1.4),
        "OffPolicySequenceMask": gl.OffPolicySequenceMask(0.05),
        "two": (TRUNCATED, gl.KeepWithin(0.7, 1.4, "sequence")),
        "Normalized": gl.Normalized(TRUNCATED),
    },
    "select": {
        "TopEntropy": gl.TopEntropy(0.3),
        "ClipCovariance": gl.ClipCovariance(0.3, -0.4, 1.5, clip=(0.15, 0.25), seed=5),
        "SecondMoment": gl.SecondMoment(0.15),
        "VariationBudget": gl.VariationBudget(0.2),
        "TVRegion": gl.TVRegion(0.01, 0.02),
        "KLRegion": gl.KLRegion(0.01, 0.02),
        "ProbabilityBand": gl.ProbabilityBand(0.03),
    },
    "terms": {"CovariancePenalty": (gl.CovariancePenalty(0.3, 0.7),)},
}
KINDS = tuple(PARTS)
REFUSED = {frozenset((one, other)) for one, other, _ in refused_pairs()}


def compositions(count, seed=0):
    """Random ones, then whatever is needed for every two parts to meet at least once."""
    draw = random.Random(seed)
    names = {kind: list(parts) for kind, parts in PARTS.items()}
    chosen = [{kind: draw.choice(names[kind]) for kind in KINDS} for _ in range(count)]
    seen = {pair for c in chosen for pair in itertools.combinations(sorted(c.items()), 2)}
    for one, other in itertools.combinations(sorted(KINDS), 2):
        for pair in itertools.product(names[one], names[other]):
            if ((one, pair[0]), (other, pair[1])) not in seen:
                rest = {kind: draw.choice(names[kind]) for kind in KINDS}
                chosen.append(rest | {one: pair[0], other: pair[1]})
                seen |= set(itertools.combinations(sorted(chosen[-1].items()), 2))
    return chosen


def is_refused(chosen):
    words = [f"{kind}={name}" for kind, name in chosen.items()]
    return any(frozenset(pair) in REFUSED for pair in itertools.combinations(words, 2))


def make(chosen):
    parts = {kind: MADE.get(kind, {}).get(name, PARTS[kind][name]) for kind, name in chosen.items()}
    return gl.PolicyLoss(**parts, beta=0.2, entropy_coef=0.03, pull=0.05, nll_coef=0.1)


def formula(chosen):
    return Formula(**chosen, beta=0.2, entropy_coef=0.03, pull=0.05, nll_coef=0.1, n=NUMBERS)


def in_micro_batches(loss, batch, parts, layouts):
    """Loss and gradients of a step in micro-batches, with the totals that a survey of the whole step gives."""
    inputs, outputs, keywords = batch.arguments()
    totals = loss.survey(inputs, outputs, **{k: v for k, v in keywords.items() if k != "ref_logps"})
    value = torch.zeros((), dtype=torch.float64)
    grads = [torch.zeros_like(batch.values["logps"]) for _ in range(2)]
    for part, layout in zip(parts, itertools.cycle(layouts), strict=False):
        leaves = batch.take(part).leaves()
        inputs, outputs, keywords = leaves.arguments(layout)
        out = loss(inputs | {"sequence_ids": torch.tensor(part)}, outputs, totals=totals, **keywords)
        out.loss.backward()
        value += out.loss.detach()
        for grad, name in zip(grads, ("logps", "entropies"), strict=True):
            if leaves.values[name].grad is not None:
                grad[part] += leaves.values[name].grad
    return value, *grads


def random_split(draw, size):
    order = list(range(size))
    draw.shuffle(order)
    cuts = sorted(draw.sample(range(1, size), 2))
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, size])]


def check(chosen, draw, step=STEP):
    """False when it is refused, as the catalogue says; else it agrees with the oracle, whole and split."""
    if is_refused(chosen):
        with pytest.raises(InputError):
            make(chosen)
        return False
    loss = make(chosen)
    truth = expected(formula(chosen), step)
    assert_same(value_and_grad(loss, step), truth, 1e-11)
    parts = random_split(draw, len(step.slots))
    assert_same(in_micro_batches(loss, step, parts, ("padded", "cu_seqlens [T]", "positions [1, T]")), truth, 1e-11)
    return True


def test_the_parts_here_are_those_of_the_catalogue():
    for kind, parts in MADE.items():
        assert set(parts) <= set(PARTS[kind])


def test_any_composition_agrees_with_its_formula_in_any_split_order_and_layout_or_is_refused():
    draw = random.Random(1)
    worked = [check(chosen, draw) for chosen in compositions(220)]
    assert sum(worked) > 150 and not all(worked)


STOPPED = {"sequence_token_level", "ClippedWeight", "GammaWeight", "k3_straight_through"}


def test_gradients_agree_with_finite_differences():
    """Where no gradient is stopped; there the oracle above stands."""
    inputs, outputs, keywords = TINY.arguments()
    done = 0
    for chosen in compositions(120, seed=2)[:120]:
        if is_refused(chosen) or STOPPED & set(chosen.values()):
            continue
        loss = make(chosen)
        leaves = [outputs[name].clone().requires_grad_() for name in ("logps", "entropies")]

        def call(logps, entropies, loss=loss):
            return loss(inputs, {"logps": logps, "entropies": entropies}, **keywords).loss

        assert torch.autograd.gradcheck(call, leaves), chosen
        done += 1
    assert done > 25


def test_two_kinds_of_pairs_are_refused():
    reasons = {frozenset((one, other)): reason for one, other, reason in refused_pairs()}
    twice, local = "is over the sampler already", "divides by the tokens of the local batch"
    levels = ("sampler_level", "CorrectedSum")
    weighing = [name for name in PARTS["correction"] if name not in ("none", "KeepWithin", "OffPolicySequenceMask")]
    expected = {frozenset((f"level={a}", f"correction={b}")): twice for a in levels for b in weighing}
    expected[frozenset(("aggregate=local_token_mean", "rejected=left_out"))] = local
    assert reasons.keys() == expected.keys() and len(reasons) == 15
    assert all(expected[pair] in reason for pair, reason in reasons.items())


# --- what surveys are for -------------------------------------------------------------------------------------------


def test_a_micro_batch_without_the_survey_of_its_step_is_refused():
    inputs, outputs, keywords = STEP.arguments()
    with pytest.raises(InputError, match=r"loss\.survey"):
        gl.TopEntropyLoss()(inputs, outputs, totals=_totals(STEP), **keywords)


def _totals(batch):
    from gruppo.batch import Totals

    return Totals(sequences=len(batch.slots), tokens=int(batch.mask.sum()))


def test_a_threshold_of_the_micro_batch_would_give_another_loss():
    """The test above would pass by itself if the selection were the same in every part of the step."""
    loss = gl.TopEntropyLoss(share=0.3)
    whole = value_and_grad(loss, STEP)[1]
    apart = torch.cat([value_and_grad(loss, STEP.take([i]), totals=None)[1] for i in range(6)])
    assert ((whole == 0) != (apart == 0)).any()


def test_drawn_tokens_need_their_place_in_the_step():
    loss = gl.ClipCovLoss(share=0.3, bounds=(-0.4, 1.5))
    inputs, outputs, keywords = STEP.arguments()
    totals = loss.survey(inputs, outputs, **{k: v for k, v in keywords.items() if k != "ref_logps"})
    with pytest.raises(InputError, match="sequence_ids"):
        loss(inputs, outputs, totals=totals, **keywords)


def test_another_seed_draws_other_tokens_and_the_same_seed_the_same():
    def left_out(seed):
        loss = gl.ClipCovLoss(share=0.3, bounds=(-9.0, 9.0), clip_range=5.0, seed=seed)
        grad = value_and_grad(loss, STEP)[1]
        return ((grad == 0) & STEP.mask).nonzero().tolist()

    drawn = {seed: left_out(seed) for seed in range(6)}
    assert [len(tokens) for tokens in drawn.values()] == [6] * 6
    assert len({str(tokens) for tokens in drawn.values()}) == 6
    assert drawn[0] == left_out(0)


def test_draws_are_uniform():
    from gruppo.batch.segments import Segments
    from gruppo.random import token_places, token_uniforms

    segments = Segments.from_rows(torch.ones(100, 200, dtype=torch.bool))
    u = token_uniforms(token_places(torch.arange(100), segments), torch.full((20000,), 7), seed=0, step=0)
    counts = torch.histc(u, bins=20, min=0, max=1)
    # 1000 expected in each, standard deviation 31
    assert (counts - 1000).abs().max() < 4 * 31
    assert len(u.unique()) == 20000


def test_clip_cov_draws_other_tokens_in_every_step():
    """100 tokens that all qualify, 10 left out per step, 200 steps: each goes about 20 times, give or take 4.2."""
    from gruppo.batch import Totals

    torch.manual_seed(0)
    labels = torch.randint(0, 50, (4, 25))
    logps = torch.linspace(-2, 2, 100, dtype=torch.float64).view(4, 25).requires_grad_()
    loss = gl.ClipCovLoss(share=0.1, bounds=(-100.0, 100.0))
    count = torch.zeros(4, 25)
    for step in range(200):
        totals = loss.survey(
            {"labels": labels}, {"logps": logps}, advantages=[1.0, 2.0, -1.0, 3.0],
            totals=Totals(sequences=4, tokens=100, step=step),
        )  # fmt: skip
        output = loss(
            {"labels": labels, "sequence_ids": torch.arange(4)}, {"logps": logps}, advantages=[1.0, 2.0, -1.0, 3.0],
            totals=totals,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(output.loss, logps)
        assert (grad == 0).sum() == 10 == output.rejected
        count += grad == 0
    assert count.min() >= 5 and count.max() <= 40


@pytest.mark.parametrize("noise", [1e-7, 3e-7, 1e-6])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_tokens_that_tie_up_to_rounding_are_chosen_together(noise, share):
    """First tokens of a group have one entropy, computed in different micro-batches with other last digits."""
    torch.manual_seed(1)
    entropies = torch.rand(8, 10)
    entropies[:, 0] = 0.8  # the tie lies where the share cuts
    labels = torch.ones(8, 10, dtype=torch.int64)

    def kept(entropies):
        loss = gl.TopEntropyLoss(share=share)
        logps = torch.full((8, 10), -1.0, requires_grad=True)
        call = {"advantages": torch.arange(1.0, 9.0)}
        loss({"labels": labels}, {"logps": logps, "entropies": entropies}, **call).loss.backward()
        return logps.grad != 0

    expected = kept(entropies)
    for _ in range(20):
        assert torch.equal(kept(entropies + noise * torch.randn(8, 10)), expected)


def test_gaps_of_one_size_below_the_cut_do_not_compete():
    """Entropies of a model in float32, whose two gaps of 4.67e-5 rounding makes the wider one in turn."""
    from gruppo.loss.weights import cut_below_top

    values = torch.tensor([5.7, 5.69, 5.6863995, 5.6863527, 5.6863060, 5.68, 5.67], dtype=torch.float64)
    for signs in itertools.product((-2e-6, 0.0, 2e-6), repeat=3):
        shifted = values.clone()
        shifted[2:5] += torch.tensor(signs, dtype=torch.float64)
        for count in (3, 4, 5):
            assert (shifted > cut_below_top(shifted, count)).sum() == count


@pytest.mark.parametrize(
    ("values", "count", "kept"),
    [
        ([5.0, 1.0, 1.0, 1.0 - 3e-6, 0.5], 2, 4),  # equal up to rounding: together
        ([5.0, 1.0, 1.0 - 5e-6, 0.5], 2, 2),  # not equal
        ([5.0, 8.0, 8.0 - 30e-6, 8.0 - 60e-6, 1.0], 1, 3),  # relative to their size, step by step
        ([5.0, 1.0, 1.0 - 3e-6, 1.0 - 6e-6, 1.0 - 9.5e-6, 1.0 - 13.4e-6, 1.0 - 16e-6], 2, 5),  # the widest up to 1e-5
        ([-5.0, -1.0, -1.0 - 3e-6], 1, 2),
    ],
)
def test_a_cut_lies_below_the_last_value_and_those_equal_to_it(values, count, kept):
    from gruppo.loss.weights import cut_below_top

    given = torch.tensor(values, dtype=torch.float64)
    assert (given > cut_below_top(given, count)).sum() == kept


def test_a_dense_cut_keeps_the_share():
    """A million tokens lie closer than a tie: the cut must not slide down through all of them."""
    from gruppo.loss.weights import cut_below_top

    torch.manual_seed(0)
    values = torch.rand(1_000_000)
    assert (values > cut_below_top(values, 200_000)).sum().item() == pytest.approx(200_000, abs=20)


@pytest.mark.parametrize("value", ["sometimes", None])
def test_rejected_is_one_of_two_words(value):
    with pytest.raises(InputError, match="'counted' or 'left_out'"):
        gl.PolicyLoss(rejected=value)


def test_rejected_tokens_in_and_out_of_the_mean_by_hand():
    # On-policy, ratio 1. rho = 1, 1, 4 with IcePop up to 2: the third token, a sequence of its own, is rejected.
    labels = torch.tensor([[1, 2], [3, -100]])
    logps = torch.tensor([[-1.0, -2.0], [-1.5, 0.0]], dtype=torch.float64)
    sampler = logps - torch.tensor([[0.0, 0.0], [4.0, 1.0]], dtype=torch.float64).clamp(min=1).log()
    call = {"advantages": [3.0, 5.0], "sampler_logps": sampler}
    for aggregate, counted, left_out in (
        (gl.token_mean, -6 / 3, -6 / 2),
        (gl.sequence_mean, -3 / 2, -3 / 1),
        (gl.sequence_mean_token_sum, -6 / 2, -6 / 1),
        (gl.ConstantLength(10), -6 / 20, -6 / 10),
        (gl.token_sum, -6, -6),
    ):
        for rejected, value in (("counted", counted), ("left_out", left_out)):
            loss = gl.PolicyLoss(aggregate=aggregate, correction=gl.MaskedWeight(0.5, 2.0), rejected=rejected)
            assert loss({"labels": labels}, {"logps": logps}, **call).loss.item() == pytest.approx(value)
