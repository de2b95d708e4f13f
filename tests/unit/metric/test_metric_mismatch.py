"""MismatchMetric: by hand, with garbage where nothing is scored, and the same for every split."""

import math

import pytest
import torch

from gruppo.errors import InputError
from gruppo.metric import MismatchMetric

LABELS = torch.tensor([[1, 2, -100], [3, -100, -100], [-100, -100, -100]])
# rho = 4, 1/4 in the first sequence and 1.5 in the second
OLD = torch.tensor([[-1.0, -2.0, 9.0], [-3.0, float("nan"), 1.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
SAMPLER = OLD - torch.tensor([[math.log(4), -math.log(4), 3.0], [math.log(1.5), 7.0, 1.0], [1.0, 1.0, 1.0]])


def report(rows=(slice(0, 3),), **options):
    metric = MismatchMetric(**options)
    for part in rows:
        metric.accumulate({"labels": LABELS[part]}, old_logps=OLD[part], sampler_logps=SAMPLER[part])
    return metric.calculate()


def test_by_hand():
    got = report()
    total, squares = 4 + 0.25 + 1.5, 16 + 0.0625 + 2.25
    expected = {
        "sampler/logp_gap_mean": (2 * math.log(4) + math.log(1.5)) / 3,
        "sampler/logp_gap_max": math.log(4),
        "sampler/kl": ((4 - math.log(4) - 1) + (0.25 + math.log(4) - 1) + (1.5 - math.log(1.5) - 1)) / 3,
        "sampler/rho_mean": total / 3,
        "sampler/rho_max": 4.0,
        "sampler/rho_min": 0.25,
        "sampler/rho_high_frac": 1 / 3,
        "sampler/rho_low_frac": 1 / 3,
        "sampler/chi2": squares / 3 - 1,
        "sampler/ess": total**2 / squares / 3,
        "sampler/sequence_chi2": (1**2 + 1.5**2) / 2 - 1,  # products 1 and 1.5; the third row has no tokens
        "sampler/sequence_ess": (1 + 1.5) ** 2 / (1 + 2.25) / 2,
    }
    assert got == pytest.approx(expected, rel=1e-6)


def test_any_split_gives_the_same_bits():
    assert report([slice(0, 1), slice(1, 2), slice(2, 3)]) == report() == report([slice(1, 3), slice(0, 1)])


def test_equal_log_probs_are_no_mismatch():
    metric = MismatchMetric()
    metric.accumulate({"labels": LABELS}, old_logps=OLD, sampler_logps=OLD)
    got = metric.calculate()
    assert (got["sampler/kl"], got["sampler/chi2"], got["sampler/ess"], got["sampler/rho_max"]) == (0.0, 0.0, 1.0, 1.0)


def test_the_maximum_may_be_below_one():
    metric = MismatchMetric()
    metric.accumulate({"labels": LABELS}, old_logps=OLD, sampler_logps=OLD + math.log(2))
    got = metric.calculate()
    assert (got["sampler/rho_max"], got["sampler/rho_min"]) == pytest.approx((0.5, 0.5))


def test_nothing_scored_reports_nothing_and_reset_forgets():
    metric = MismatchMetric()
    metric.accumulate({"labels": torch.full((2, 2), -100)}, old_logps=OLD[:2, :2], sampler_logps=SAMPLER[:2, :2])
    assert metric.calculate() == {}
    metric.accumulate({"labels": LABELS}, old_logps=OLD, sampler_logps=SAMPLER)
    metric.reset()
    assert metric.calculate() == {}


def test_the_tail_is_beyond_one():
    with pytest.raises(InputError, match=r"tail must exceed 1, got 0\.5"):
        MismatchMetric(tail=0.5)
    assert report(tail=1.4)["sampler/rho_high_frac"] == pytest.approx(2 / 3)
