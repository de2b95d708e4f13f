"""The family against results of the real verl and TRL code: loss and gradient, float64 (family.json says how made)."""

import json
import math
from pathlib import Path

import pytest
import torch

from gruppo import loss as gl
from gruppo.metric import MismatchMetric

GOLDEN = json.loads((Path(__file__).parent / "family.json").read_text(encoding="utf-8"))
DATA = {name: torch.tensor(value, dtype=torch.float64) for name, value in GOLDEN["data"].items()}
LABELS = torch.where(DATA["mask"].bool(), 1, -100)
AGGREGATES = {
    "token-mean": gl.token_mean,
    "token-sum": gl.token_sum,
    "seq-mean-token-sum": gl.sequence_mean_token_sum,
    "seq-mean-token-mean": gl.sequence_mean,
}


def rho_part(n):
    if "is" not in n:
        return None
    part = gl.TruncatedWeight(n["high"], level="token" if n["is"] == "token" else "sequence_sum")
    return gl.Normalized(part) if n.get("normalize") else part


def reject(level):
    def make(n):
        low, high = n["bounds"]
        return gl.PolicyLoss(
            surrogate=gl.LogProb(),
            aggregate=gl.token_mean,
            correction=gl.KeepWithin(low, high, level),
            rejected="left_out",
        )

    return make


def only_kl(kl):
    """beta 1 and no policy term: advantages are 0 in these cases."""
    return lambda n: gl.PolicyLoss(kl=kl, beta=1.0, aggregate=gl.token_mean)


HERE = {
    ("verl", "dppo_tv"): lambda n: gl.DPPOTVLoss(region=tuple(n["region"]), cap=n["cap"]),
    ("verl", "dppo_kl"): lambda n: gl.DPPOKLLoss(region=tuple(n["region"]), cap=n["cap"]),
    ("verl", "clip_cov"): lambda n: gl.ClipCovLoss(
        clip_range=tuple(n["clip"]), share=n["share"], bounds=tuple(n["bounds"])
    ),
    ("verl", "kl_cov"): lambda n: gl.KLCovLoss(share=n["share"], coef=n["coef"]),
    ("verl", "geo_mean"): lambda n: gl.GMPOLoss(log_clip=tuple(n["log_clip"])),
    ("verl", "gpg"): lambda n: gl.PolicyLoss(surrogate=gl.LogProb(), aggregate=AGGREGATES[n["agg"]]),
    ("verl", "dro"): lambda n: gl.DROLoss(strength=n["strength"]),
    ("verl", "vanilla"): lambda n: gl.DualClipLoss(clip_range=tuple(n["clip"]), cap=n["cap"], correction=rho_part(n)),
    ("verl", "gspo"): lambda n: gl.GSPOTokenLoss(clip_range=tuple(n["clip"])),
    ("verl", "kl/k1"): only_kl(gl.k1),
    ("verl", "kl/k2"): only_kl(gl.k2),
    ("verl", "kl/k3"): only_kl(gl.k3),
    ("verl", "kl/abs"): only_kl(gl.abs_kl),
    ("verl", "kl/k3+"): only_kl(gl.k3_straight_through),
    ("verl", "reject/token_k1"): reject("token"),
    ("verl", "reject/seq_mean_k1"): reject("sequence"),
    ("verl", "reject/seq_sum_k1"): reject("sequence_sum"),
    ("trl", "two_sided"): lambda n: gl.TwoSidedLoss(clip_range=tuple(n["clip"]), delta=n["delta"]),
    ("trl", "opsm"): lambda n: gl.GRPOLoss(correction=gl.OffPolicySequenceMask(n["threshold"])),
    ("trl", "opsm_old"): lambda n: gl.GRPOLoss(correction=gl.OffPolicySequenceMask(n["threshold"], "old")),
    ("trl", "top_entropy"): lambda n: gl.TopEntropyLoss(clip_range=0.2, share=n["share"]),
    ("trl", "luspo"): lambda n: gl.LUSPOLoss(clip_range=tuple(n["clip"])),
    ("trl", "vespo"): lambda n: gl.VESPOLoss(),
    ("trl", "gmpo"): lambda n: gl.GMPOLoss(log_clip=tuple(n["log_clip"])),
}


def test_every_peer_function_has_a_case():
    assert {(c["peer"], c["name"]) for c in GOLDEN["cases"]} == set(HERE)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['peer']}-{c['name']}-{c['numbers']}")
def test_loss_and_gradient_are_the_peers(case):
    loss = HERE[case["peer"], case["name"]](case["numbers"])
    logps = DATA["logps"].clone().requires_grad_()
    advantages = DATA["advantages"] * (0 if case["name"].startswith("kl/") else 1)
    value = loss(
        {"labels": LABELS},
        {"logps": logps, "entropies": DATA["entropies"]},
        advantages=advantages,
        old_logps=DATA["old_logps"],
        ref_logps=DATA["ref_logps"],
        sampler_logps=DATA["sampler_logps"],
    ).loss
    (gradient,) = torch.autograd.grad(value, logps)
    expected = torch.tensor(case["d_logps"], dtype=torch.float64)
    # verl divides by counts + 1e-8
    assert value.item() == pytest.approx(case["loss"], abs=1e-7)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_mismatch_diagnostics_are_verls():
    metric = MismatchMetric()
    metric.accumulate({"labels": LABELS}, old_logps=DATA["old_logps"], sampler_logps=DATA["sampler_logps"])
    ours, theirs = metric.calculate(), GOLDEN["diagnostics"]
    names = {"k3_kl": "kl", "chi2_token": "chi2", "chi2_seq": "sequence_chi2", "ess": "ess", "mean": "rho_mean"}
    for name, key in names.items():
        assert ours[f"sampler/{key}"] == pytest.approx(theirs[name], rel=1e-6), name
    assert (ours["sampler/rho_max"], ours["sampler/rho_min"]) == pytest.approx((theirs["max"], theirs["min"]), rel=1e-6)
    assert not math.isclose(ours["sampler/chi2"], ours["sampler/sequence_chi2"])
