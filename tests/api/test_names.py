"""The public names, constructor keywords and call keywords: what a user's code relies on. Removing or renaming one of
these is a breaking change; adding one is not. Parts of losses and further estimators are pinned by the tables of
`docs/losses.md` and `docs/advantages.md` (test_docs.py)."""

import inspect
from dataclasses import fields
from importlib import import_module

import pytest

from gruppo import advantage, batch, errors, kernel, loss, metric, types
from gruppo.loss.named import LossOptions

NAMES = {
    "gruppo.loss": {
        "BNPOLoss",
        "CISPOLoss",
        "CORRECTIONS",
        "DAPOLoss",
        "DRGRPOLoss",
        "GRPOLoss",
        "GSPOLoss",
        "KL_ESTIMATORS",
        "LOSSES",
        "LossInputs",
        "LossOutput",
        "NamedLoss",
        "PolicyLoss",
        "SAPOLoss",
        "Term",
        "part",
    },
    "gruppo.advantage": {
        "ADVANTAGES",
        "Advantage",
        "GRPOAdvantage",
        "Groups",
        "RLOOAdvantage",
        "groups_with_signal",
        "not_truncated",
    },
    "gruppo.metric": {
        "CISPOMetric",
        "GRPOMetric",
        "GSPOMetric",
        "MismatchMetric",
        "PolicyMetric",
        "metric_for",
        "pass_at_k",
    },
    "gruppo.batch": {
        "IGNORE_INDEX",
        "PackedBatch",
        "Segments",
        "SharedPrompts",
        "Totals",
        "is_packed",
        "pack",
        "pack_rows",
        "pack_shared",
        "pad_tokens",
        "prompt_groups",
        "split_by_tokens",
        "split_padded",
        "split_shared",
    },
    "gruppo.recipes": {"RECIPES", "Recipe", "recipe"},
    "gruppo.kernel": {"Head", "linear_logps_and_entropy", "logps_and_entropy"},
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_there(module):
    assert NAMES[module] - set(import_module(module).__all__) == set()


@pytest.mark.parametrize("module", NAMES)
def test_every_listed_name_exists_once(module):
    listed = import_module(module).__all__
    assert sorted(set(listed)) == sorted(listed)
    assert [name for name in listed if not hasattr(import_module(module), name)] == []


def signature(function):
    """{name: default}, with `...` for a parameter that must be given; keyword-only ones carry a star."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    return {
        ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name: ... if p.default is p.empty else p.default for p in named
    }


LOSS_KEYWORDS = {
    "GRPOLoss": {"*clip_range": 0.2},
    "GSPOLoss": {"*clip_range": 0.2},
    "SAPOLoss": {"*clip_range": 0.2, "*tau": 1.0},
    "CISPOLoss": {"*clip_range": 0.2},
    "BNPOLoss": {"*clip_range": 0.2},
    "DRGRPOLoss": {"*clip_range": 0.2, "*max_completion_length": 1024},
    "DAPOLoss": {"*clip_range": (0.2, 0.28)},
}


@pytest.mark.parametrize("name", loss.LOSSES)
def test_every_named_loss_takes_the_shared_keywords_and_no_other(name):
    make = loss.LOSSES[name]
    made = make(beta=0.25, kl_estimator="abs_kl", entropy_coef=0.5)
    assert (made.beta, made.kl, made.entropy_coef) == (0.25, loss.abs_kl, 0.5)
    assert make(beta=0.25, kl_estimator="absolute", entropy_coef=0.5) == made
    with pytest.raises(TypeError, match=f"{make.__name__}.*epsilon"):
        make(epsilon=0.2)


def test_what_makes_a_loss_cannot_be_replaced():
    for name in ("M2POLoss", "KLCovLoss"):
        with pytest.raises(TypeError, match="its own select"):
            getattr(loss, name)(select=loss.TopEntropy())


@pytest.mark.parametrize("name", LOSS_KEYWORDS)
def test_own_keywords_of_a_named_loss(name):
    assert signature(getattr(loss, name)) == LOSS_KEYWORDS[name]


def test_keywords_that_every_named_loss_takes():
    assert set(LossOptions.__annotations__) == {
        "beta",
        "kl_estimator",
        "entropy_coef",
        "correction",
        "select",
        "rejected",
    }


@pytest.mark.parametrize("name", LOSS_KEYWORDS)
def test_every_shared_keyword_reaches_the_loss(name):
    correction = loss.TruncatedWeight()
    made = getattr(loss, name)(beta=0.25, kl_estimator=1, entropy_coef=0.5, correction=correction)
    assert (made.beta, made.kl, made.entropy_coef, made.correction) == (0.25, loss.k2, 0.5, correction)


@pytest.mark.parametrize("name", LOSS_KEYWORDS)
def test_defaults_of_a_named_loss(name):
    made = getattr(loss, name)()
    assert (made.beta, made.kl, made.entropy_coef, made.correction) == (0.0, loss.k3, 0.0, None)
    assert made.clip_range == ((0.2, 0.28) if name == "DAPOLoss" else (0.2, 0.2))


def test_parts_of_a_policy_loss():
    assert signature(loss.PolicyLoss) == {
        "*level": loss.token_level,
        "*surrogate": loss.Clip(),
        "*weights": (),
        "*terms": (),
        "*aggregate": loss.sequence_mean,
        "*rejected": "counted",
        "*clip_range": None,
        "*correction": None,
        "*select": None,
        "*kl": loss.k3,
        "*beta": 0.0,
        "*entropy_coef": 0.0,
        "*pull": 0.0,
        "*nll_coef": 0.0,
    }


@pytest.mark.parametrize("name", ["PolicyLoss", *LOSS_KEYWORDS])
def test_call_of_a_loss(name):
    assert signature(getattr(loss, name).__call__) == {
        "inputs": ...,
        "outputs": ...,
        "*advantages": ...,
        "*old_logps": None,
        "*ref_logps": None,
        "*sampler_logps": None,
        "*totals": None,
    }


def test_survey_of_a_step():
    assert signature(loss.PolicyLoss.survey) == {
        "inputs": ...,
        "outputs": ...,
        "*advantages": ...,
        "*old_logps": None,
        "*sampler_logps": None,
        "*totals": None,
    }


def test_fields_of_a_loss_output():
    assert {"loss", "terms"} <= {f.name for f in fields(loss.LossOutput)}


def test_kl_estimators_by_number():
    assert (loss.k1, loss.k2, loss.k3, loss.ratio_k1) == loss.KL_ESTIMATORS


@pytest.mark.parametrize("cls", [advantage.GRPOAdvantage, advantage.RLOOAdvantage])
def test_advantage_keywords(cls):
    assert signature(cls) == {"normalization": "centered", "ddof": 1, "eps": 1e-8}


@pytest.mark.parametrize("name", advantage.ADVANTAGES)
def test_every_estimator_is_called_alike(name):
    assert signature(advantage.ADVANTAGES[name].__call__) == {
        "rewards": ...,
        "num_generations": 1,
        "scale": None,
        "group_ids": None,
        "*lengths": None,
        "*greedy_rewards": None,
        "*correct": None,
    }


OWN = {
    "scale": {
        "group": {"grpo", "rloo", "gdpo", "pass_at_k", "best_of_group", "lead"},
        "batch": {"lite_ppo", "reinforce_pp", "reinforce_pp_baseline"},
        "none": {"drgrpo", "remax", "opo", "gpg", "maxrl", "beta_norm", "length_shaped"},
    },
    "needs": {("lengths",): {"opo", "length_shaped", "lead"}, ("greedy_rewards",): {"remax"}},
    "uses": {
        ("lengths",): {"reinforce_pp", "reinforce_pp_baseline"},
        ("correct",): {"maxrl", "beta_norm", "pass_at_k", "length_shaped", "lead"},
    },
    "per_reward": {True: {"gdpo"}},
    "judges_answers": {True: {"pass_at_k", "lead"}},
    "takes_scale": {True: {"grpo", "rloo"}},
}


@pytest.mark.parametrize("attribute", OWN)
def test_what_a_run_reads_of_an_estimator(attribute):
    found = {}
    for name, cls in advantage.ADVANTAGES.items():
        found.setdefault(getattr(cls, attribute), set()).add(name)
    assert {value: names for value, names in found.items() if value} == OWN[attribute]


@pytest.mark.parametrize("cls", [metric.GRPOMetric, metric.GSPOMetric, metric.CISPOMetric])
def test_metric_keywords(cls):
    assert signature(cls) == {
        "device_mesh": None,
        "process_group": None,
        "epsilon": 0.2,
        "epsilon_high": None,
        "temperature": 1.0,
        "top_k_kl": 0,
        "ignore_index": -100,
    }
    assert signature(cls.accumulate) == {"inputs": ..., "outputs": ..., "*old_logps": None, "*advantages": None}
    assert (signature(cls.calculate), signature(cls.reset)) == ({}, {})


def test_batch_calls():
    assert signature(batch.pack) == {"inputs": ...}
    assert signature(batch.pack_shared) == {"inputs": ..., "*row_slots": None, "*multiple_of": 1}
    assert signature(batch.split_by_tokens) == {"lengths": ..., "tokens_per_microbatch": ...}
    assert signature(batch.pack_rows) == {"values_BL": ..., "attention_BL": ...}
    assert signature(batch.pad_tokens) == {"values_T": ..., "cu_seqlens": ..., "fill": ..., "*rounds": False}
    assert signature(batch.Totals) == {
        "*sequences": ...,
        "*tokens": ...,
        "*local_tokens": None,
        "*local_share": 1.0,
        "*step": 0,
        "*survey": None,
    }


def test_fields_of_a_packed_batch():
    assert [f.name for f in fields(batch.PackedBatch)][:5] == [
        "input_ids",
        "labels",
        "position_ids",
        "cu_seqlens",
        "scored",
    ]


def test_kernel_calls():
    expected = {"hidden": ..., "weight": ..., "labels": ..., "temperature": 1.0}
    assert signature(kernel.linear_logps_and_entropy) == expected
    assert signature(kernel.logps_and_entropy) == {"logits": ..., "labels": ..., "temperature": 1.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("InputFeature", {"prompt_ids", "completion_ids", "completion_mask", "old_logps", "ref_logps"}),
        ("Trajectory", {"prompt", "tokens", "sampled", "logps", "versions", "text", "stop_reason"}),
        ("SampleResponse", {"sequences"}),
        ("Rollout", {"trajectory", "reward", "rewards", "correct", "advantage", "old_logps", "ref_logps"}),
        ("Group", {"prompt", "rollouts"}),
    ],
)
def test_fields_of_the_types(name, expected):
    assert expected - {f.name for f in fields(getattr(types, name))} == set()


def test_a_trajectory_becomes_an_input_feature():
    sequence = types.Trajectory(
        prompt=types.Prompt(token_ids=(1,)), tokens=(2, 3), logps=(-0.5, -1.0), text="b", stop_reason="stop"
    )
    expected = types.InputFeature(prompt_ids=(1,), completion_ids=(2, 3), old_logps=(-0.5, -1.0))
    assert sequence.new_input_feature == expected


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("InputError", ValueError),
        ("MissingExtraError", ImportError),
        ("NumericError", ArithmeticError),
        ("RewardError", RuntimeError),
        ("SamplerError", RuntimeError),
        ("CheckpointError", RuntimeError),
    ],
)
def test_every_error_is_also_the_standard_one(name, standard):
    assert issubclass(getattr(errors, name), (errors.GruppoError, standard))
    assert issubclass(getattr(errors, name), standard)
