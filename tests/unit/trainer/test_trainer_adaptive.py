"""Rules that move a coefficient between steps, by hand."""

import pytest

from gruppo.errors import InputError
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
    assert AdaptiveKL(target=0.1, horizon=1000).next(0.5, kl=kl, count=32) == pytest.approx(beta)


def test_beta_doubles_while_the_kl_stays_high():
    rule, beta = AdaptiveKL(target=0.1, horizon=100), 1.0
    for _ in range(4):
        beta = rule.next(beta, kl=1.0, count=100)
    assert beta == pytest.approx(1.2**4)


def test_the_bonus_grows_below_its_target_and_shrinks_above():
    rule = AdaptiveEntropy(target=0.2, change=0.005, lowest=0.0, highest=0.012)
    coefs, coef = [], 0.0
    for entropy in (0.1, 0.2, 0.15, 0.3, 0.9, 0.9, 0.9):
        coef = rule.next(coef, entropy)
        coefs.append(coef)
    assert coefs == pytest.approx([0.005, 0.01, 0.012, 0.007, 0.002, 0.0, 0.0])


def test_the_bonus_acts_only_at_or_below_its_target():
    rule = AdaptiveEntropy(target=0.2)
    assert (rule.applied(0.01, 0.2), rule.applied(0.01, 0.2001)) == (0.01, 0.0)


@pytest.mark.parametrize(
    "make",
    [lambda: AdaptiveKL(0.0), lambda: AdaptiveKL(0.1, -1), lambda: AdaptiveEntropy(0.1, change=0),
     lambda: AdaptiveEntropy(0.1, lowest=2)],
)  # fmt: skip
def test_numbers_that_make_no_rule_are_refused(make):
    with pytest.raises(InputError):
        make()
