"""The scorer against the definition: plain logits of each sequence alone, log-softmax, one token at a time."""

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    FAMILIES,
    actor,
    gradients,
    largest_gap,
    logps_one_by_one,
    perturb_adapter,
    random_features,
    tiny_model,
)

from gruppo.batch import PackedBatch
from gruppo.kernel import head as kernel_head
from gruppo.loss import DAPOLoss, GRPOLoss, GSPOLoss
from gruppo.metric import GRPOMetric
from gruppo.model import LoraSpec, TransformersModel, logp_model
from gruppo.model.logp_model import LogpModel
from gruppo.types import InputFeature


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_are_those_of_each_sequence_alone(family: str, layout: str) -> None:
    features = random_features(seed=1)
    model = actor(family, layout=layout, double=True)
    scored = model.forward_only(features)
    logps, entropies = logps_one_by_one(model.model, features)
    assert largest_gap(scored["logps"], logps) < 1e-12
    assert largest_gap(scored["entropies"], entropies) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_logps_in_float32_are_within_1e_5_of_float64(family: str) -> None:
    features = random_features(seed=1)
    expected, _ = logps_one_by_one(tiny_model(family).double(), features)
    assert largest_gap(actor(family).forward_only(features)["logps"], expected) < 1e-5


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT, about GPT-2's Conv1D
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_with_an_adapter_are_those_of_each_sequence_alone(family: str, layout: str) -> None:
    features = random_features(seed=2)
    base, _ = logps_one_by_one(tiny_model(family), features)
    model = actor(family, lora=LoraSpec(rank=2), layout=layout)
    perturb_adapter(model.model)
    model.model.double()
    expected, _ = logps_one_by_one(model.model, features)
    assert largest_gap(expected, base) > 0.5  # the adapter matters
    assert largest_gap(model.forward_only(features)["logps"], expected) < 1e-12


@pytest.mark.row("R-34", "temperature in the trainer")
def test_logps_at_a_temperature_divide_the_logits() -> None:
    features = random_features(seed=3)
    model = actor("qwen3", temperature=0.7)
    logps, entropies = logps_one_by_one(model.model, features, temperature=0.7)
    scored = model.forward_only(features)
    assert largest_gap(scored["logps"], logps) < 1e-5
    assert largest_gap(scored["entropies"], entropies) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral", "gemma3"])
def test_a_head_of_ours_takes_the_place_of_a_plain_one_with_its_parameters(family: str) -> None:
    model = tiny_model(family)
    linear = model.get_output_embeddings()
    head = LogpModel(model).head
    assert head is not None and model.get_output_embeddings() is head
    assert head.weight is linear.weight and (head.bias, head.scale, head.soft_cap) == (None, 1.0, None)


def test_scale_cap_and_bias_of_a_family_are_found() -> None:
    found = {family: LogpModel(tiny_model(family)).head for family in ("gemma2", "cohere", "granite", "phi")}
    assert all(head is not None for head in found.values())
    shapes = {f: (h.scale, h.soft_cap, h.bias is not None) for f, h in found.items() if h is not None}
    assert shapes == {
        "gemma2": (1.0, 3.0, False),
        "cohere": (0.25, None, False),
        "granite": (1 / 3.0, None, False),
        "phi": (1.0, None, True),
    }


def test_a_cap_that_the_config_does_not_tell_is_seen() -> None:
    # At 30 the cap moves these logits by little; the scorer must still not score without it.
    model = tiny_model("gemma2", final_logit_softcapping=30.0)
    forward_of_model = model.forward

    def forward_with_the_config_silent(*args, **options):
        model.config.final_logit_softcapping = 30.0
        result = forward_of_model(*args, **options)
        model.config.final_logit_softcapping = None
        return result

    model.config.final_logit_softcapping = None
    model.forward = forward_with_the_config_silent
    linear = model.get_output_embeddings()
    assert LogpModel(model).head is None
    assert model.get_output_embeddings() is linear  # left as it was


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "phi"])
def test_the_walk_through_a_shaped_head_is_the_plain_model_in_value_and_gradient(family: str) -> None:
    features = random_features(seed=6)
    advantages = [1.0, -0.5, 0.25, 2.0, -1.0, 0.5]
    grads = {}
    for head in ("dense", "walk"):
        model = actor(family, double=True, head=head, temperature=0.8)
        if family == "phi":
            torch.nn.init.normal_(model.model.lm_head.bias, generator=torch.Generator().manual_seed(1))
        expected, entropies = logps_one_by_one(model.model, features, temperature=0.8)
        scored = model.forward_only(features)
        assert largest_gap(scored["logps"], expected) < 1e-12
        assert largest_gap(scored["entropies"], entropies) < 1e-12
        model.set_loss(GRPOLoss(entropy_coef=0.1))
        model.forward_backward(features, advantages=advantages)
        grads[head] = {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}
    assert grads["walk"].keys() == grads["dense"].keys()
    assert "lm_head.bias" in grads["walk"] or family != "phi"
    for name, expected in grads["dense"].items():
        torch.testing.assert_close(grads["walk"][name], expected, rtol=1e-9, atol=1e-12)


def test_an_adapted_head_is_scored_with_its_adapter() -> None:
    features = random_features(seed=4)
    spec = LoraSpec(rank=2, targets=("lm_head", "q_proj"))
    model = actor(lora=spec)
    perturb_adapter(model.model)
    expected, _ = logps_one_by_one(model.model, features)
    assert largest_gap(model.forward_only(features)["logps"], expected) < 1e-5


def test_masked_completion_tokens_are_context_and_not_scored() -> None:
    whole = InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8, 9, 10))
    masked = InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8, 9, 10), completion_mask=(1, 0, 0, 1))
    model = actor()
    (all_four,) = model.forward_only([whole])["logps"]
    (two,) = model.forward_only([masked])["logps"]
    assert two.tolist() == [all_four[0].item(), all_four[3].item()]


def test_a_split_into_microbatches_does_not_move_logps() -> None:
    features = random_features(num=9, seed=5)
    together = actor("qwen3").forward_only(features)
    for budget in (1, 12, 25):
        apart = actor("qwen3", tokens_per_microbatch=budget).forward_only(features)
        assert largest_gap(apart["logps"], together["logps"]) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_forward_only_is_bitwise_the_forward_that_trains(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = random_features(seed=6)
    model = actor(family)
    alone = torch.cat(model.forward_only(features)["logps"])
    seen = []
    score = type(model.logp_model).__call__

    def spy(self: LogpModel, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logps, entropies = score(self, batch)
        seen.append((logps.requires_grad, logps.detach()))
        return logps, entropies

    monkeypatch.setattr(LogpModel, "__call__", spy)
    model.forward_backward(features, advantages=[1.0] * len(features))
    ((with_gradient, trained),) = seen
    assert with_gradient
    assert torch.equal(trained, alone)


# --- the head that walks over windows, without ever holding all logits ---

ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0, 0.5, -2.0, 0.75]
LOSSES = {
    "grpo": GRPOLoss(),
    "grpo with kl": GRPOLoss(beta=0.1),
    "gspo": GSPOLoss(),
    "dapo with entropy": DAPOLoss(entropy_coef=0.1),
}
# Bytes for the logits of a window: everything at once; some sequences (of up to 8 tokens); less than a sequence.
SCRATCH = {"one window": 1 << 20, "several": 32 * 8 * 30, "tiny": 32 * 8 * 6}


@pytest.mark.parametrize("scratch", SCRATCH)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_the_walking_head_gives_the_loss_and_gradients_of_the_plain_one(
    loss: str, scratch: str, lora: LoraSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_head, "CPU_SCRATCH", SCRATCH[scratch])
    features = [
        replace(f, old_logps=tuple(-3.0 + 0.1 * ((7 * i + 3 * j) % 11) for j in range(f.num_scored)))
        for i, f in enumerate(random_features(num=8, seed=7))
    ]
    found = []
    for head in ("dense", "walk"):
        model = actor(temperature=0.8, head=head, lora=lora)
        if lora:
            perturb_adapter(model.model)
        model.model.double()
        model.set_loss(LOSSES[loss])
        logps = model.forward_only(features)["logps"]
        result = model.forward_backward(features, advantages=ADVANTAGES)
        found.append((logps, result.loss.item(), gradients(model.model)))
    (plain_logps, plain_loss, plain_grads), (logps, value, grads) = found
    assert largest_gap(logps, plain_logps) < 1e-12
    assert value == pytest.approx(plain_loss, abs=1e-12)
    assert grads.keys() == plain_grads.keys()
    for name, gradient in plain_grads.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("scratch", SCRATCH)
@pytest.mark.parametrize("loss", ["grpo", "grpo with kl", "gspo"])
@pytest.mark.parametrize("head", ["dense", "walk"])
def test_with_either_head_the_first_step_has_ratio_one_and_kl_zero_to_the_bit(
    loss: str, head: str, scratch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_head, "CPU_SCRATCH", SCRATCH[scratch])
    features = random_features(num=8, seed=7)
    model = actor("qwen3", temperature=0.8, head=head)
    model.set_loss(LOSSES[loss])
    model.add_metric(GRPOMetric())
    old = model.forward_only(features)["logps"]
    result = model.forward_backward(features, advantages=ADVANTAGES, old_logps=old)
    metrics = model.calculate_metric()
    # A loss over whole sequences walks in windows of its own, so that products add up in another order: one unit of
    # float32 in the log-prob, where all others are equal to the bit.
    rounding = 2.5e-7 if (head, loss) == ("walk", "gspo") else 0.0
    assert metrics["train/token_ratio_max"] == pytest.approx(1.0, abs=rounding)
    assert metrics["train/token_kl_max"] == pytest.approx(0.0, abs=rounding)
    assert result.terms.get("kl", torch.tensor(0.0)).item() == 0.0


def test_scoring_and_training_choose_the_same_head_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit lies between the scored tokens and all slots of this batch: both must look at the same number."""
    features = random_features(num=8, seed=7)
    scored = sum(f.num_scored for f in features)
    slots = sum(len(f.input_ids) - 1 for f in features)
    monkeypatch.setattr(logp_model, "SMALL_LOGITS", 32 * (scored + slots) // 2)
    monkeypatch.setattr(kernel_head, "CPU_SCRATCH", SCRATCH["tiny"])
    routes: list[str] = []
    score, train = kernel_head.Head.score, kernel_head.Head.train
    monkeypatch.setattr(kernel_head.Head, "score", lambda *a, **k: routes.append("score") or score(*a, **k))
    monkeypatch.setattr(kernel_head.Head, "train", lambda *a, **k: routes.append("train") or train(*a, **k))
    model = actor()
    model.forward_only(features)
    model.forward_backward(features, advantages=ADVANTAGES)
    assert routes in ([], ["score", "train"])


class OutOfRange(kernel_head.ChunkRoute):
    """A route that finds a log-prob out of its range in the last window of a walk, as the fused one can."""

    def window(self, head, hidden, labels, stats, directions):
        stats.overflowed.fill_(1)
        return kernel_head.TORCH.window(head, hidden, labels, stats, directions)


def test_a_walk_that_begins_again_on_another_route_counts_its_loss_once(monkeypatch: pytest.MonkeyPatch) -> None:
    features = random_features(num=8, seed=7)
    monkeypatch.setattr(kernel_head, "CPU_SCRATCH", SCRATCH["tiny"])
    results = []
    for route in (kernel_head.TORCH, OutOfRange("fused", "gruppo.kernel.chunk_ops", holds_logits=False)):
        monkeypatch.setattr(kernel_head, "best_route", lambda _weight, route=route: route)
        monkeypatch.setattr(kernel_head, "TRITON", kernel_head.TORCH)
        model = actor("qwen3", head="walk")
        model.set_loss(DAPOLoss(beta=0.1, entropy_coef=0.0))
        output = model.forward_backward(features, advantages=ADVANTAGES)
        results.append((output.loss, output.terms["policy"], gradients(model.model)))
    (loss, policy, grads), (again, policy_again, grads_again) = results
    assert abs(loss.item()) > 1e-3
    torch.testing.assert_close((again, policy_again), (loss, policy), rtol=1e-6, atol=1e-7)
    assert largest_gap(list(grads_again.values()), list(grads.values())) < 1e-6


@pytest.mark.parametrize("head", ["dense", "walk"])
def test_a_body_that_ends_in_float32_meets_a_head_in_bfloat16(head: str) -> None:
    """Mamba keeps its residuals in float32 whatever its weights are in."""
    features = random_features(seed=8)
    model = TransformersModel(tiny_model("mamba2").bfloat16(), device="cpu", head=head)
    expected, _ = logps_one_by_one(tiny_model("mamba2"), features)
    assert largest_gap(model.forward_only(features)["logps"], expected) < 0.1
    model.forward_backward(features, advantages=[1.0, -0.5, 0.25, 2.0, -1.0, 0.5])
    whole = TransformersModel(tiny_model("mamba2"), device="cpu", head=head)
    whole.forward_backward(features, advantages=[1.0, -0.5, 0.25, 2.0, -1.0, 0.5])
    ours = {name: master.grad for name, master in model.weights.named().items() if master.grad is not None}
    theirs = gradients(whole.model)
    assert ours.keys() == theirs.keys()
    for name in ("backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"):
        cosine = torch.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), dim=0)
        assert cosine > 0.99


@pytest.mark.row("R-32", "a bfloat16 model")
def test_bfloat16_weights_give_float32_logps_near_the_float32_model() -> None:
    features = random_features(seed=8)
    scored = TransformersModel(tiny_model("llama").bfloat16(), device="cpu").forward_only(features)
    assert {x.dtype for x in scored["logps"] + scored["entropies"]} == {torch.float32}
    expected, _ = logps_one_by_one(tiny_model("llama"), features)
    # bf16 keeps 8 bits: hidden states of size 1 are off by 4e-3, logits of size 2 by some hundredths.
    assert largest_gap(scored["logps"], expected) < 0.3
    # Rounded to bf16 the log-probs would be multiples of 2**-8 at least; these are not.
    values = torch.cat(scored["logps"])
    assert not torch.equal(values, values.bfloat16().float())
