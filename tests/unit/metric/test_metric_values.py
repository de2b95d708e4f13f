"""Every key of the three metrics by hand, and which keys appear when an input is missing.

Two sequences of 2 + 1 tokens. Log-probs -1, -2 | -0.5, ratios 1.62, 0.5 | 0.7, advantages +1 | -2, entropies
0.3, 0.6 | 0.9. Sums are kept on a grid of 2^-30, hence tolerances of 1e-9.
"""

import math
import weakref

import pytest
import torch

from gruppo.errors import InputError
from gruppo.loss import (
    BNPOLoss,
    CISPOLoss,
    ClippedWeight,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyGradient,
    PolicyLoss,
    SAPOLoss,
    sequence_token_level,
)
from gruppo.loss.inputs import align
from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric, PolicyMetric, metric_for, pass_at_k

LABELS = torch.tensor([[-100, 7, 8], [-100, 9, -100]])
LOGPS, RATIOS, ADVANTAGES = [-1.0, -2.0, -0.5], [1.62, 0.5, 0.7], [1.0, -2.0]
LOG_RATIOS = [math.log(r) for r in RATIOS]
METRICS = [GRPOMetric, GSPOMetric, CISPOMetric]
every_metric = pytest.mark.parametrize("cls", METRICS)
NAN = float("nan")


def rows(values, fill=0.0):
    """Three numbers, one per scored token, at their slots."""
    return torch.full((2, 3), fill, dtype=torch.float64).masked_scatter(
        LABELS != -100, torch.tensor(values, dtype=torch.float64)
    )


OLD = [x - g for x, g in zip(LOGPS, LOG_RATIOS, strict=True)]


def accumulated(metric, **replaced):
    keywords = {"old_logps": rows(OLD), "advantages": ADVANTAGES, **replaced}
    metric.accumulate({"labels": LABELS}, {"logps": rows(LOGPS), "entropies": rows([0.3, 0.6, 0.9])}, **keywords)
    return metric


# k3 of a token is r - 1 - ln r; the largest is 0.5 - 1 + ln 2 = 0.193 of the second token.
SHARED = {
    "train/policy_confidence": math.exp(-3.5 / 3),
    "train/mean_new_logp": -3.5 / 3,
    "train/mean_old_logp": sum(OLD) / 3,
    "train/logp_diff_mean": math.log(1.62 * 0.5 * 0.7) / 3,
    "train/approx_kl": (1.62 + 0.5 + 0.7 - 3 - math.log(1.62 * 0.5 * 0.7)) / 3,
    "train/token_kl_max": math.log(2) - 0.5,
    "train/token_ratio_max": 1.62,
    "train/entropy": 0.6,
}
CLIP_RATES = {
    # 1.62 > 1.2 with A > 0 is high; 0.5 < 0.8 with A > 0 is not clipped; 0.7 < 0.8 with A < 0 is low
    GRPOMetric: (1 / 3, 1 / 3),
    # sqrt(1.62 * 0.5) = 0.9 is inside, 0.7 with A < 0 is low: one of two sequences
    GSPOMetric: (1 / 2, 0.0),
    # whatever the advantage: 0.5 and 0.7 are low, 1.62 is high
    CISPOMetric: (2 / 3, 1 / 3),
}


@every_metric
def test_every_key_by_hand(cls):
    low, high = CLIP_RATES[cls]
    clip = {"train/clip_ratio": low + high, "train/clip_ratio_low": low, "train/clip_ratio_high": high}
    assert accumulated(cls()).calculate() == pytest.approx(SHARED | clip, abs=1e-8)


@pytest.mark.parametrize(
    ("cls", "low", "high"),
    [(GRPOMetric, 0.0, 1 / 3), (GSPOMetric, 0.0, 0.0), (CISPOMetric, 1 / 3, 1 / 3)],
)
def test_epsilon_is_the_distance_of_each_bound(cls, low, high):
    # bounds 0.6 and 1.5: 0.7 is inside now
    results = accumulated(cls(epsilon=0.4, epsilon_high=0.5)).calculate()
    assert (results["train/clip_ratio_low"], results["train/clip_ratio_high"]) == (low, high)


def test_epsilon_high_defaults_to_epsilon():
    # 1 + 0.7 is above 1.62
    assert accumulated(GRPOMetric(epsilon=0.7)).calculate()["train/clip_ratio_high"] == 0.0


def test_grpo_counts_by_the_advantage_of_each_token():
    # 1.62 with A < 0 and 0.5 with A < 0: only the second is cut off, and 0.7 with A > 0 is not
    results = accumulated(GRPOMetric(), advantages=rows([-1.0, -1.0, 1.0])).calculate()
    assert (results["train/clip_ratio_low"], results["train/clip_ratio_high"]) == (1 / 3, 0.0)


def test_gspo_decides_by_the_mean_advantage_of_the_sequence():
    # sequence 1 has ratio 0.7: low only for a negative mean
    negative = accumulated(GSPOMetric(), advantages=rows([0.0, 0.0, -1.0])).calculate()
    positive = accumulated(GSPOMetric(), advantages=rows([0.0, 0.0, 1.0])).calculate()
    assert (negative["train/clip_ratio_low"], positive["train/clip_ratio_low"]) == (0.5, 0.0)


def test_gspo_does_not_count_sequences_without_scored_tokens():
    metric = accumulated(GSPOMetric())
    empty = {"labels": torch.full((3, 2), -100)}
    metric.accumulate(empty, {"logps": torch.zeros(3, 2)}, old_logps=torch.zeros(3, 2), advantages=[-1.0, 1.0, 1.0])
    assert metric.calculate()["train/clip_ratio_low"] == 0.5


# --- temperature ----------------------------------------------------------------------------------------------------


@every_metric
def test_temperature_scales_log_probs_means_and_kl(cls):
    results = accumulated(cls(temperature=2.0)).calculate()
    assert results["train/mean_new_logp"] == pytest.approx(-7 / 3, abs=1e-8)
    assert results["train/policy_confidence"] == pytest.approx(math.exp(-7 / 3), abs=1e-8)
    assert results["train/mean_old_logp"] == pytest.approx(2 * sum(OLD) / 3, abs=1e-8)
    assert results["train/logp_diff_mean"] == pytest.approx(2 * sum(LOG_RATIOS) / 3, abs=1e-8)
    # r^2 - 1 - 2 ln r
    kl = [r * r - 1 - 2 * math.log(r) for r in RATIOS]
    assert results["train/approx_kl"] == pytest.approx(sum(kl) / 3, abs=1e-8)
    assert results["train/token_kl_max"] == pytest.approx(max(kl), abs=1e-8)


@every_metric
def test_temperature_leaves_clip_rates_ratio_and_entropy(cls):
    hot, plain = accumulated(cls(temperature=2.0)).calculate(), accumulated(cls()).calculate()
    for key in ("token_ratio_max", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "entropy"):
        assert hot[f"train/{key}"] == plain[f"train/{key}"]


# --- which keys -----------------------------------------------------------------------------------------------------

NEW_KEYS = {"policy_confidence", "mean_new_logp"}
OLD_KEYS = {"mean_old_logp", "logp_diff_mean", "approx_kl", "token_kl_max", "token_ratio_max"}
CLIP_KEYS = {"clip_ratio", "clip_ratio_low", "clip_ratio_high"}


def keys(results):
    return {key.removeprefix("train/") for key in results}


@every_metric
def test_without_old_logps_nothing_is_compared(cls):
    results = accumulated(cls(), old_logps=None).calculate()
    assert keys(results) == NEW_KEYS | {"entropy"}
    assert results["train/mean_new_logp"] == pytest.approx(-3.5 / 3, abs=1e-8)


@every_metric
def test_without_advantages_nothing_is_clipped(cls):
    assert keys(accumulated(cls(), advantages=None).calculate()) == NEW_KEYS | OLD_KEYS | {"entropy"}


@every_metric
def test_without_entropies_there_is_no_entropy(cls):
    metric = cls()
    metric.accumulate({"labels": LABELS}, {"logps": rows(LOGPS)}, old_logps=rows(OLD), advantages=ADVANTAGES)
    assert keys(metric.calculate()) == NEW_KEYS | OLD_KEYS | CLIP_KEYS


def test_logits_bring_their_entropy():
    metric = GRPOMetric()
    metric.accumulate({"labels": LABELS}, {"logits": torch.zeros(2, 3, 10)})
    assert metric.calculate() == pytest.approx(
        {"train/policy_confidence": 0.1, "train/mean_new_logp": -math.log(10), "train/entropy": math.log(10)}, abs=1e-6
    )


def test_old_logps_of_some_micro_batches_are_averaged_over_those():
    metric = accumulated(GRPOMetric(), old_logps=None)
    accumulated(metric)
    results = metric.calculate()
    assert results["train/mean_old_logp"] == pytest.approx(sum(OLD) / 3, abs=1e-8)
    assert results["train/mean_new_logp"] == pytest.approx(-3.5 / 3, abs=1e-8)


@every_metric
def test_nothing_seen_reports_nothing(cls):
    assert cls().calculate() == {}


@every_metric
def test_nothing_scored_reports_nothing(cls):
    metric = cls(top_k_kl=2)
    metric.accumulate(
        {"labels": torch.full((2, 3), -100)}, {"logps": rows(LOGPS)}, old_logps=rows(OLD), advantages=ADVANTAGES
    )
    assert metric.calculate() == {}


@every_metric
def test_reset_forgets_everything(cls):
    metric = accumulated(cls(top_k_kl=2))
    before = metric.calculate()
    metric.reset()
    assert metric.calculate() == {}
    assert accumulated(metric).calculate() == before


@every_metric
def test_calculate_does_not_consume(cls):
    metric = accumulated(cls(top_k_kl=2))
    assert metric.calculate() == metric.calculate()


@every_metric
@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf"), 1e4])
def test_masked_slots_change_nothing(cls, garbage):
    metric = cls(top_k_kl=2)
    metric.accumulate(
        {"labels": LABELS},
        {"logps": rows(LOGPS, garbage), "entropies": rows([0.3, 0.6, 0.9], garbage)},
        old_logps=rows(OLD, garbage),
        advantages=ADVANTAGES,
    )
    assert metric.calculate() == accumulated(cls(top_k_kl=2)).calculate()


@every_metric
def test_ignore_index_is_the_label_that_is_not_scored(cls):
    metric = cls(ignore_index=0, top_k_kl=2)
    metric.accumulate(
        {"labels": torch.where(LABELS == -100, 0, LABELS)},
        {"logps": rows(LOGPS), "entropies": rows([0.3, 0.6, 0.9])},
        old_logps=rows(OLD),
        advantages=ADVANTAGES,
    )
    assert metric.calculate() == accumulated(cls(top_k_kl=2)).calculate()


def test_ignore_index_tells_padding_in_a_packed_row_too():
    # Two trailing padding slots at position 0, labelled -1: one sequence, one advantage.
    metric = GRPOMetric(ignore_index=-1)
    inputs = {"labels": torch.tensor([-1, 8, 9, -1, -1]), "position_ids": torch.tensor([0, 1, 2, 0, 0])}
    old = torch.tensor([0.0, -1.0, -1.0, 0.0, 0.0])
    metric.accumulate(inputs, {"logps": old + math.log(1.5)}, old_logps=old, advantages=[1.0])
    assert metric.calculate()["train/clip_ratio_high"] == 1.0


@every_metric
def test_the_graph_of_the_log_probs_is_not_kept_alive(cls):
    metric = cls(top_k_kl=2)
    logps = rows(LOGPS).requires_grad_() * 1
    alive = weakref.ref(logps)
    metric.accumulate({"labels": LABELS}, {"logps": logps}, old_logps=rows(OLD), advantages=ADVANTAGES)
    del logps
    assert alive() is None


def test_far_outside_ratio_and_kl_are_bounded():
    # log-ratios +800 and -800: the ratio is bounded at e^20, the difference in the KL at 40
    metric = GRPOMetric()
    labels, old = torch.tensor([[3, 4]]), torch.zeros(1, 2)
    metric.accumulate({"labels": labels}, {"logps": torch.tensor([[800.0, -800.0]])}, old_logps=old, advantages=[1.0])
    results = metric.calculate()
    assert results["train/token_ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)
    assert results["train/token_kl_max"] == pytest.approx(math.expm1(40) - 40, rel=1e-6)


def test_slots_that_are_not_scored_do_not_count_as_ratio_one():
    metric = accumulated(GRPOMetric(), old_logps=rows([x - math.log(0.5) for x in LOGPS]))
    assert metric.calculate()["train/token_ratio_max"] == pytest.approx(0.5)


# --- top K ----------------------------------------------------------------------------------------------------------


def test_top_k_records_by_hand():
    # KL 0.138 of token 7, 0.193 of token 8, 0.7 - 1 - ln 0.7 = 0.057 of token 9
    records = accumulated(GRPOMetric(top_k_kl=2)).calculate()["train/top_k_kl"]
    first = {"sequence": 0, "position": 2, "token_id": 8, "kl": math.log(2) - 0.5, "ratio": 0.5}
    second = {"sequence": 0, "position": 1, "token_id": 7, "kl": 0.62 - math.log(1.62), "ratio": 1.62}
    assert records == [
        pytest.approx(first | {"new_logp": -2.0, "old_logp": OLD[1]}),
        pytest.approx(second | {"new_logp": -1.0, "old_logp": OLD[0]}),
    ]
    assert [type(records[0][k]) for k in ("sequence", "position", "token_id")] == [int, int, int]


def test_top_k_numbers_sequences_through_over_micro_batches():
    metric = accumulated(accumulated(GRPOMetric(top_k_kl=6)))
    records = metric.calculate()["train/top_k_kl"]
    assert [(r["sequence"], r["token_id"]) for r in records] == [(0, 8), (2, 8), (0, 7), (2, 7), (1, 9), (3, 9)]


def test_top_k_of_fewer_tokens_reports_those():
    records = accumulated(GRPOMetric(top_k_kl=50)).calculate()["train/top_k_kl"]
    assert [r["token_id"] for r in records] == [8, 7, 9]


def test_of_equal_tokens_the_earlier_comes_first():
    metric = GRPOMetric(top_k_kl=3)
    labels = torch.arange(10, 18).view(2, 4)
    metric.accumulate({"labels": labels}, {"logps": torch.zeros(2, 4)}, old_logps=torch.full((2, 4), -0.5))
    assert [r["token_id"] for r in metric.calculate()["train/top_k_kl"]] == [10, 11, 12]


def test_a_kl_of_zero_is_reported_before_an_unscored_slot():
    metric = GRPOMetric(top_k_kl=3)
    metric.accumulate({"labels": LABELS}, {"logps": rows(LOGPS)}, old_logps=rows(LOGPS))
    assert [(r["token_id"], r["kl"]) for r in metric.calculate()["train/top_k_kl"]] == [(7, 0.0), (8, 0.0), (9, 0.0)]


def test_no_top_k_without_old_logps():
    assert "train/top_k_kl" not in accumulated(GRPOMetric(top_k_kl=2), old_logps=None).calculate()


# --- the loss's own bounds ------------------------------------------------------------------------------------------


@every_metric
def test_from_loss_takes_the_bounds_of_the_loss(cls):
    metric = cls.from_loss(GRPOLoss(clip_range=(0.4, 0.5)), top_k_kl=1)
    assert accumulated(metric).calculate() == accumulated(cls(epsilon=0.4, epsilon_high=0.5, top_k_kl=1)).calculate()


def test_from_loss_of_dapo_has_the_higher_bound():
    metric = GRPOMetric.from_loss(DAPOLoss())
    assert (metric.low, metric.high) == pytest.approx((0.8, 1.28))


def test_from_loss_without_a_clip_is_refused():
    with pytest.raises(InputError, match="PolicyLoss has no clip_range; give epsilon and epsilon_high instead"):
        GRPOMetric.from_loss(PolicyLoss(surrogate=PolicyGradient()))


@pytest.mark.parametrize(
    ("loss", "cls"),
    [
        (GRPOLoss(), GRPOMetric),
        (GSPOLoss(), GSPOMetric),
        (SAPOLoss(), GRPOMetric),
        (CISPOLoss(), CISPOMetric),
        (BNPOLoss(), GRPOMetric),
        (DRGRPOLoss(), GRPOMetric),
        (DAPOLoss(), GRPOMetric),
        (PolicyLoss(level=sequence_token_level), GSPOMetric),
        (PolicyLoss(surrogate=ClippedWeight()), CISPOMetric),
        (PolicyLoss(surrogate=PolicyGradient()), GRPOMetric),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_metric_for_a_loss(loss, cls):
    assert type(metric_for(loss)) is cls


@pytest.mark.parametrize("loss", [GRPOLoss(), DAPOLoss()], ids=["GRPO", "DAPO"])
def test_clipped_tokens_are_those_without_gradient(loss):
    # The rate is the share of scored tokens whose gradient the clip cut off.
    logps = rows(LOGPS).requires_grad_()
    loss({"labels": LABELS}, {"logps": logps}, old_logps=rows(OLD), advantages=ADVANTAGES).loss.backward()
    cut_off = (logps.grad[LABELS != -100] == 0).double().mean().item()
    assert accumulated(GRPOMetric.from_loss(loss)).calculate()["train/clip_ratio"] == pytest.approx(cut_off)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon and epsilon_high must be positive, got 0.0 and None"),
        ({"epsilon_high": -0.1}, "epsilon and epsilon_high must be positive, got 0.2 and -0.1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"top_k_kl": -1}, "top_k_kl must be 0 or more, got -1"),
    ],
)
@every_metric
def test_unusable_options_are_refused(cls, options, message):
    with pytest.raises(InputError, match=message):
        cls(**options)


@every_metric
def test_unknown_keyword_is_a_type_error(cls):
    with pytest.raises(TypeError, match="unexpected keyword argument 'eps'"):
        cls(eps=0.2)


@every_metric
def test_misaligned_old_logps_are_refused_and_not_cut(cls):
    with pytest.raises(InputError, match=r"old_logps has shape \(2, 2\) and labels \(2, 3\)"):
        accumulated(cls(), old_logps=torch.zeros(2, 2))


def test_a_new_metric_must_say_what_it_clips():
    with pytest.raises(NotImplementedError):
        accumulated(PolicyMetric())


# --- pass@k ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the one correct sample
        (4, 2, 2, 5 / 6),  # only 1 of 6 pairs holds none
        (4, 2, 3, 1.0),
        (4, 0, 3, 0.0),
        (4, 4, 1, 1.0),
    ],
)
def test_pass_at_k_by_counting(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_of_impossible_counts_is_refused(n, c, k):
    with pytest.raises(InputError, match=f"1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_a_refused_call_without_advantages_does_not_change_what_the_next_one_reports():
    labels, logps = torch.tensor([[1, 2]]), torch.tensor([[-1.0, -2.0]])
    metric = GRPOMetric()
    with pytest.raises(InputError, match="old_logps"):
        metric.accumulate({"labels": labels}, {"logps": logps}, old_logps=torch.zeros(1, 3))
    metric.add(align({"labels": labels}, {"logps": logps}, old_logps=logps - 1, advantages=[1.0]))
    assert metric.calculate()["train/clip_ratio"] == 1.0  # both ratios are e
