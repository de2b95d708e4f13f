"""Advice: each symptom is named with its cause, and a healthy run is left alone."""

import pytest

from gruppo.keys import KEYS
from gruppo.run.advice import advice

HEALTHY = {
    "reward/mean": 0.5,
    "group/dead_frac": 0.2,
    "group/all_right_frac": 0.1,
    "completion/truncated_frac": 0.0,
    "completion/empty_frac": 0.0,
    "live/approx_kl": 0.01,
    "sampler/logp_gap_max": 1e-6,
}


def test_a_healthy_run_gets_no_advice() -> None:
    assert advice([HEALTHY] * 20) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"completion/truncated_frac": 0.6},
            "completion/truncated_frac is 0.6, above 0.5: raise max_new_tokens",
        ),
        ({"group/dead_frac": 1.0, "reward/mean": 0.0}, "all groups are dead at reward 0"),
        (
            {"group/dead_frac": 0.9},
            "most groups have no signal: their completions all earn the same. Raise group_size",
        ),
        (
            {"completion/empty_frac": 0.6},
            "completion/empty_frac is 0.6, above 0.5: the model ends at once",
        ),
        (
            {"live/approx_kl": 1.5},
            "live/approx_kl is 1.5, above 1: the policy moves far",
        ),
        (
            {"sampler/logp_gap_max": 2.0},
            "sampler/logp_gap_max is 2, above 1: sampler and trainer disagree",
        ),
    ],
)
def test_each_symptom_is_named_with_its_cause(changes: dict[str, float], sentence: str) -> None:
    (said,) = advice([HEALTHY | changes] * 20)
    assert said.startswith(sentence)


def test_groups_that_are_all_right_are_no_reason_for_advice() -> None:
    assert advice([HEALTHY | {"group/dead_frac": 0.95, "group/all_right_frac": 0.9, "reward/mean": 0.97}] * 20) == []


def test_a_few_steps_are_too_few_for_advice() -> None:
    assert advice([HEALTHY | {"completion/truncated_frac": 1.0}] * 4) == []


def test_advice_looks_at_the_mean_of_the_steps() -> None:
    mixed = [HEALTHY | {"completion/truncated_frac": x} for x in (1.0, 0.0, 0.0, 0.0, 1.0)]
    assert advice(mixed) == []


def test_a_run_in_which_nothing_is_scored_is_told_so_and_no_more() -> None:
    unscored = {key: value for key, value in HEALTHY.items() if key != "reward/mean"} | {"group/dead_frac": 1.0}
    (said,) = advice([unscored] * 20)
    assert said.startswith("no reward function has scored a completion")


def test_numbers_that_are_not_finite_get_no_advice() -> None:
    assert advice([HEALTHY | {"live/approx_kl": float("nan")}] * 20) == []


def test_every_healthy_range_of_the_registry_has_its_remedy_said() -> None:
    for key in KEYS:
        if key.healthy is not None:
            (said,) = advice([HEALTHY | {key.name: key.healthy[1] + 0.25}] * 20)
            assert said.startswith(key.name) and said.endswith(key.remedy)
