"""Rules that move a coefficient between steps, by hand."""

import pytest

from gruppo.errors import InputError
from gruppo.trainer import TrainConfig
from gruppo.trainer.state import AdaptiveEntropy, AdaptiveKL


@pytest.mark.parametrize(
    ("kl", "beta"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 32 / 1000)),
        (0.5, 0.5 * (1 + 0.2 * 32 / 1000)),  # the error is bounded to a fifth
        (0.0, 0.5 * (1 - 0.2 * 32 / 1000)),
    ],
)
def test_beta_follows_the_kl(kl, beta):
    rule = AdaptiveKL(0.5, target=0.1, horizon=1000)
    rule.follow(kl, completions=32)
    assert rule.coefficient == pytest.approx(beta)


def test_beta_doubles_while_the_kl_stays_high():
    rule = AdaptiveKL(1.0, target=0.1, horizon=100)
    for _ in range(4):
        rule.follow(1.0, completions=100)
    assert rule.coefficient == pytest.approx(1.2**4)


def test_the_bonus_grows_below_its_target_and_shrinks_above():
    rule = AdaptiveEntropy(0.0, target=0.2, change=0.005, highest=0.012)
    coefs = []
    for entropy in (0.1, 0.2, 0.15, 0.3, 0.9, 0.9, 0.9):
        rule.follow(entropy)
        coefs.append(rule.coefficient)
    assert coefs == pytest.approx([0.005, 0.01, 0.012, 0.007, 0.002, 0.0, 0.0])


def test_the_bonus_acts_only_at_or_below_its_target():
    rule = AdaptiveEntropy(0.01, target=0.2)
    assert (rule.at(0.2), rule.at(0.2001)) == (0.01, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"kl_target": 0.0}, {"kl_horizon": -1}, {"entropy_change": 0}, {"entropy_target": 0}]
)
def test_numbers_that_make_no_rule_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        TrainConfig.read({"kl_in_reward": 0.1} | wrong)
