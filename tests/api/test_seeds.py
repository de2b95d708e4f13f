"""The calls of the specification's examples, with this package's name."""

import pytest
import torch

from gruppo.advantage import GRPOAdvantage
from gruppo.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric

INPUTS = {"labels": torch.tensor([[-100, 3, 4], [-100, 5, -100]])}
LOGPS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]])
ADVANTAGES = [1.0, -1.0]

LOSSES = {
    "GRPOLoss": lambda: GRPOLoss(
        clip_range=0.2,
        beta=0.01,  # KL penalty coefficient
    ),
    "GSPOLoss": lambda: GSPOLoss(clip_range=0.2, beta=0.01),
    "SAPOLoss": lambda: SAPOLoss(clip_range=0.2, beta=0.01, tau=1.0),
    "CISPOLoss": lambda: CISPOLoss(clip_range=0.2, beta=0.01),
    "BNPOLoss": lambda: BNPOLoss(clip_range=0.2, beta=0.01),
    "DRGRPOLoss": lambda: DRGRPOLoss(clip_range=0.2, beta=0.01),
}

# Ratio 1 and advantages +1 | -1 over 2 + 1 tokens; ref = logp - 0.5, so k3 = e^-0.5 - 0.5 = 0.10653 for each token.
K3 = torch.tensor(-0.5).exp().item() - 0.5
ON_POLICY = {
    "GRPOLoss": 0.0 + 0.01 * K3,
    "GSPOLoss": 0.0 + 0.01 * K3,
    "SAPOLoss": 0.0 + 0.01 * K3,  # -2 and +2 cancel
    "CISPOLoss": -(-1.0 - 2.0 + 0.5) / 3 + 0.01 * K3,
    "BNPOLoss": -1 / 3 + 0.01 * K3,
    "DRGRPOLoss": (-1 + 0.01 * K3 * 3) / (2 * 1024),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_the_loss_page(name):
    out = LOSSES[name]()(INPUTS, {"logps": LOGPS}, advantages=ADVANTAGES, ref_logps=LOGPS - 0.5)
    assert out.loss.item() == pytest.approx(ON_POLICY[name], abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_the_loss_page_detect_packing_by_position_ids(name):
    packed = {"labels": torch.tensor([[-100, 3, 4, -100, 5]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    logps = torch.tensor([[0.0, -1.0, -2.0, 0.0, -0.5]])
    out = LOSSES[name]()(packed, {"logps": logps}, advantages=ADVANTAGES, ref_logps=logps - 0.5)
    assert out.loss.item() == pytest.approx(ON_POLICY[name], abs=1e-7)


def test_beta_zero_disables_the_kl():
    out = GRPOLoss(clip_range=0.2, beta=0)(INPUTS, {"logps": LOGPS}, advantages=ADVANTAGES)
    assert set(out.terms) == {"policy"}


def test_the_example_of_the_advantage_page():
    advantage_fn = GRPOAdvantage()

    # Assume 2 prompts, each generating 4 samples
    rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]  # 8 reward values
    advantages = advantage_fn(rewards, num_generations=4, scale="group")

    assert advantages.tolist() == [-0.5, 0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
    assert torch.equal(advantage_fn(rewards, num_generations=4), advantages)


def test_the_example_of_the_advantage_page_normalised():
    rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    advantages = GRPOAdvantage(normalization="standard")(rewards, num_generations=4, scale="group")
    expected = [-0.8660, 0.8660, -0.8660, 0.8660, 1.5, -0.5, -0.5, -0.5]
    assert [round(x, 4) for x in advantages.tolist()] == expected


REPORTED = {
    "train/policy_confidence",
    "train/mean_new_logp",
    "train/mean_old_logp",
    "train/logp_diff_mean",
    "train/approx_kl",
    "train/token_kl_max",
    "train/token_ratio_max",
    "train/entropy",
    "train/clip_ratio",
    "train/clip_ratio_low",
    "train/clip_ratio_high",
}


@pytest.mark.parametrize("cls", [GRPOMetric, GSPOMetric, CISPOMetric])
def test_the_usage_of_the_metric_page(cls):
    metric = cls(
        device_mesh=None,
        process_group=None,
        epsilon=0.2,  # PPO clip range
        temperature=1.0,  # Sampling temperature for logp rescaling
        top_k_kl=10,  # Track top-K high-KL tokens per step
    )
    # During training loop
    outputs = {"logps": LOGPS, "entropies": torch.full((2, 3), 2.1)}
    metric.accumulate(INPUTS, outputs, old_logps=LOGPS - 0.07, advantages=ADVANTAGES)

    # At log interval
    results = metric.calculate()
    assert set(results) == REPORTED | {"train/top_k_kl"}
    assert results["train/logp_diff_mean"] == pytest.approx(0.07, abs=1e-7)
    assert results["train/entropy"] == pytest.approx(2.1, abs=1e-6)
    assert results["train/mean_new_logp"] == pytest.approx(-3.5 / 3, abs=1e-7)
    assert results["train/clip_ratio"] == results["train/clip_ratio_low"] + results["train/clip_ratio_high"]
    assert len(results["train/top_k_kl"]) == 3


def test_confidence_is_the_exponential_of_the_mean_log_prob():
    metric = GRPOMetric()
    metric.accumulate(INPUTS, {"logps": LOGPS})
    results = metric.calculate()
    assert results["train/policy_confidence"] == pytest.approx(torch.tensor(-3.5 / 3).exp().item(), rel=1e-6)
