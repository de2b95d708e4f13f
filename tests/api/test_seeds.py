"""The calls of the specification's examples, with this package's name and a model folder of our own.

docs/tutorial.md has the functions of the post "GRPO 101" (test_tutorial.py). The loop with a real vLLM: tests/vllm.
"""

from pathlib import Path
from typing import Any

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


# --- the loss page: set on a model, trained with ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model folder, as `save_pretrained` writes it."""
    from gruppo.model import TransformersModel

    path = tmp_path_factory.mktemp("seeds") / "model"
    TransformersModel("builtin").save(path)
    return path


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_page_is_set_on_a_model_and_trains_it(name, folder):
    from gruppo.model import TransformersModel
    from gruppo.types import InputFeature

    model = TransformersModel(model_id=str(folder))
    loss_fn = LOSSES[name]()

    model.set_loss(loss_fn)

    model.set_optimizer("SGD", lr=0.05)
    features = [
        InputFeature(prompt_ids=(1, 8, 11, 14, 12, 9, 15), completion_ids=ids) for ids in ((5, 7, 6, 2), (4, 6, 6, 2))
    ]
    before = [x.sum().item() for x in model.forward_only(features)["logps"]]
    output = model.forward_backward(inputs=features, advantages=[1.0, -1.0])
    assert output.terms["kl"].item() == 0.0  # the reference is the model itself
    model.clip_grad_and_step()
    after = [x.sum().item() for x in model.forward_only(features)["logps"]]
    assert after[0] > before[0] and after[1] < before[1]


# --- the page on the clipped objective: its equations, in float64 -----------------------------------------------------

LOG_NEW = torch.tensor([[-1.0, -2.0, -0.3], [-0.7, -1.1, -2.5]], dtype=torch.float64)
LOG_OLD = LOG_NEW + torch.tensor([[0.3, -0.5, 0.05], [-0.4, 0.6, -0.1]], dtype=torch.float64)
LOG_REF = LOG_NEW + torch.tensor([[0.2, -0.9, 50.0], [0.0, 0.4, -50.0]], dtype=torch.float64)
ADVANTAGE = torch.tensor([[1.5], [-0.8]], dtype=torch.float64)
ALL = {"labels": torch.ones(2, 3, dtype=torch.int64)}


def value_and_gradient(function):
    logps = LOG_NEW.clone().requires_grad_()
    loss = function(logps)
    loss.backward()
    return loss.item(), logps.grad


def compare(loss, formula, **inputs):
    def ours(logps):
        call = {"advantages": ADVANTAGE.flatten(), "old_logps": LOG_OLD} | inputs
        return loss(ALL, {"logps": logps}, **call).loss

    got, grad = value_and_gradient(ours)
    expected, expected_grad = value_and_gradient(lambda logps: formula(logps).mean())
    assert got == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("lower", "higher"), [(0.2, 0.28), (0.2, 0.2)])
def test_the_clipped_objective_is_the_larger_of_two_losses(lower, higher):
    from gruppo.loss import DAPOLoss

    def formula(log_new):
        ratio = torch.exp(log_new - LOG_OLD)
        unclipped = -ADVANTAGE * ratio
        clipped = -ADVANTAGE * ratio.clamp(1 - lower, 1 + higher)
        return torch.maximum(unclipped, clipped)

    compare(DAPOLoss(clip_range=(lower, higher)), formula)


def test_cispo_caps_the_ratio_and_lets_the_gradient_through_the_log_prob():
    def formula(log_new):
        capped = torch.exp(log_new - LOG_OLD).clamp(max=1.28)
        return -ADVANTAGE * capped.detach() * log_new

    compare(CISPOLoss(clip_range=(0.2, 0.28)), formula)


@pytest.mark.parametrize("estimator", [0, 1, 2, 3, None])
def test_the_kl_estimators_by_number_with_the_difference_clamped(estimator):
    from gruppo.loss import DAPOLoss

    def formula(log_new):
        ratio = torch.exp(log_new - LOG_OLD)
        policy = torch.maximum(-ADVANTAGE * ratio, -ADVANTAGE * ratio.clamp(0.8, 1.2))
        diff = (log_new - LOG_REF).clamp(-40, 40)
        kl = (diff, diff**2 / 2, torch.expm1(-diff) + diff, ratio * diff)[2 if estimator is None else estimator]
        return policy + 0.1 * kl

    options = {} if estimator is None else {"kl_estimator": estimator}  # 2 is the default
    loss = DAPOLoss(clip_range=0.2, beta=0.1, **options)
    got, grad = value_and_gradient(
        lambda logps: (
            loss(ALL, {"logps": logps}, advantages=ADVANTAGE.flatten(), old_logps=LOG_OLD, ref_logps=LOG_REF).loss
        )
    )
    expected, expected_grad = value_and_gradient(lambda logps: formula(logps).mean())
    assert got == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_group_relative_advantages_of_the_page():
    scores = [0.0, 1.0, 2.0, 5.0]
    mean = 2.0
    std = (((0 - mean) ** 2 + (1 - mean) ** 2 + (2 - mean) ** 2 + (5 - mean) ** 2) / 4) ** 0.5
    standard = GRPOAdvantage(normalization="standard", ddof=0)(scores, num_generations=4)
    assert standard.tolist() == pytest.approx([(s - mean) / (std + 1e-8) for s in scores], abs=1e-6)
    assert GRPOAdvantage()(scores, num_generations=4).tolist() == [s - mean for s in scores]


# --- the advantage page: its training loop ----------------------------------------------------------------------------


def reward_fn(batch: list[Any], input_data: list[Any], tokenizer: Any) -> list[float]:
    texts = [tokenizer.decode(f.completion_ids, skip_special_tokens=True) for f in input_data]
    answers = [row["answer"] for row in batch for _ in range(4)]
    return [float(text == answer) for text, answer in zip(texts, answers, strict=True)]


def test_the_training_loop_of_the_advantage_page(folder):
    """Literally, with TorchSampler for vLLMSampler: batches of rows, no params, no step. It learns."""
    from torch.utils.data import DataLoader

    from gruppo.advantage import GRPOAdvantage
    from gruppo.model import TransformersModel
    from gruppo.sampler import TorchSampler

    torch.manual_seed(0)
    rows = [{"prompt": "47+85=", "answer": "132"}, {"prompt": "68+29=", "answer": "097"}] * 2
    dataloader = DataLoader(rows * 40, batch_size=4, collate_fn=list)

    # Create components
    actor = TransformersModel(model_id=str(folder))
    sampler = TorchSampler(actor)
    advantage_fn = GRPOAdvantage()
    actor.set_optimizer("AdamW", lr=3e-4)

    # Training loop
    earned = []
    for batch in dataloader:
        # Sample generation
        sample_response = sampler.sample(batch, num_samples=4)
        input_data = [seq.new_input_feature for response in sample_response for seq in response.sequences]
        rewards = reward_fn(batch, input_data, actor.tokenizer)

        # Calculate advantages
        advantages = advantage_fn(rewards, num_generations=4)

        # 4. Policy optimization
        loss = actor.forward_backward(inputs=input_data, advantages=advantages)
        actor.clip_grad_and_step()
        earned.append(sum(rewards) / len(rewards))
        assert loss.loss.item() == pytest.approx(0.0, abs=1e-5)  # ratio 1, and advantages of a group add up to 0
    assert sum(earned[:3]) / 3 < 0.5 and sum(earned[-3:]) / 3 > 0.9


def test_a_model_of_the_other_hub_names_an_extra_that_exists():
    import tomllib

    from gruppo.errors import MissingExtraError
    from gruppo.model import TransformersModel

    pytest.importorskip("transformers")
    with pytest.raises(MissingExtraError, match=r"pip install 'gruppo\[modelscope\]'"):
        TransformersModel(model_id="ms://Qwen/Qwen3.5-4B")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert any(name.startswith("modelscope") for name in extras["modelscope"])


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
