"""forward_backward: micro-batches are never visible, arguments come in several forms, the first step is on-policy."""

import copy
import math
from dataclasses import replace
from typing import Any

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
    weights,
)

from gruppo.batch import Totals
from gruppo.errors import InputError
from gruppo.loss import BNPOLoss, DAPOLoss, GRPOLoss, GSPOLoss
from gruppo.metric import GRPOMetric
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.lora import add_lora
from gruppo.types import InputFeature

ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0, 0.5, -2.0, 0.75, 0.0]
FEATURES = random_features(num=9, seed=11)
SLOTS = sum(len(f.input_ids) - 1 for f in FEATURES)
OFF_POLICY = [
    replace(f, old_logps=tuple(-3.0 + 0.1 * ((7 * i + 3 * j) % 11) for j in range(f.num_scored)))
    for i, f in enumerate(FEATURES)
]


def run(loss: Any, budget: int | None, *, layout: str = "padded", double: bool = True) -> tuple[float, dict[str, Any]]:
    model = actor("qwen3", double=double, tokens_per_microbatch=budget, layout=layout)
    model.set_loss(loss)
    result = model.forward_backward(OFF_POLICY, advantages=ADVANTAGES)
    return result.loss.item(), gradients(model.model)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "loss",
    [GRPOLoss(beta=0.1), GSPOLoss(), DAPOLoss(entropy_coef=0.01), BNPOLoss()],
    ids=["grpo", "gspo", "dapo", "bnpo"],
)
def test_any_split_gives_the_same_loss_and_gradient(loss: Any, layout: str) -> None:
    whole_loss, whole = run(loss, None, layout=layout)
    for budget in (1, 20, 37, SLOTS):  # every sequence alone ... everything at once
        split_loss, split = run(loss, budget, layout=layout)
        assert split_loss == pytest.approx(whole_loss, abs=1e-12)
        for name, gradient in whole.items():
            torch.testing.assert_close(split[name], gradient, atol=1e-12, rtol=0, msg=name)


def test_any_split_agrees_to_1e_6_in_float32() -> None:
    whole_loss, whole = run(GRPOLoss(), None, double=False)
    split_loss, split = run(GRPOLoss(), 1, double=False)
    assert split_loss == pytest.approx(whole_loss, abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_the_loss_and_gradient_are_those_of_the_formula() -> None:
    """GRPO written out: mean over sequences of the mean over tokens of -min(r A, clip(r) A), by autograd in float64."""
    loss, gradient = run(GRPOLoss(), 25)
    plain = tiny_model("qwen3").double()
    total: Any = 0.0
    for feature, advantage in zip(OFF_POLICY, ADVANTAGES, strict=True):
        log_p = plain(input_ids=torch.tensor([feature.input_ids])).logits[0].log_softmax(-1)
        first = len(feature.prompt_ids)
        mean: Any = 0.0
        for j, (token, old) in enumerate(zip(feature.completion_ids, feature.old_logps, strict=True)):
            ratio = (log_p[first + j - 1, token] - torch.tensor(old, dtype=torch.float32).double()).exp()
            mean = mean + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / feature.num_scored
        total = total - mean / len(FEATURES)
    total.backward()
    assert loss == pytest.approx(total.item(), abs=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [None, 1, 25])
def test_repeated_sequences_are_each_counted(budget: int | None, layout: str) -> None:
    """Equal sequences, and sequences that differ in their last token, mask, advantage or old log-probs only, share work
    in the forward; the loss and gradient are those of each one alone, added up."""
    base = InputFeature(prompt_ids=(5, 9, 4), completion_ids=(7, 8, 30))
    features = [
        base,
        base,
        replace(base, completion_ids=(7, 8, 3)),  # the last token is no input
        replace(base, completion_ids=(7, 8)),  # a beginning of the others
        replace(base, prompt_ids=(5, 9, 4, 7), completion_ids=(8, 30)),  # the same tokens, another border
        replace(base, completion_mask=(1, 0, 1)),
        InputFeature(prompt_ids=(12,), completion_ids=(6,)),
        base,
    ]
    features = [
        replace(f, old_logps=tuple(-3.0 + 0.2 * i for _ in range(f.num_scored))) for i, f in enumerate(features)
    ]
    advantages = [1.0, -0.5, 0.25, 2.0, -1.0, 0.5, -2.0, 0.75]
    # GPT-2, because its norms stay in float64; the other families' go through float32, whose rounding depends on what
    # was added up before it.
    model = actor("gpt2", double=True, tokens_per_microbatch=budget, layout=layout)
    loss = model.forward_backward(features, advantages=advantages).loss.item()
    alone = actor("gpt2", double=True)
    totals = Totals(sequences=len(features), tokens=1)
    losses = [
        alone.forward_backward([f], advantages=[a], totals=totals).loss.item()
        for f, a in zip(features, advantages, strict=True)
    ]
    assert loss == pytest.approx(sum(losses), abs=1e-12)
    for name, gradient in gradients(alone.model).items():
        torch.testing.assert_close(gradients(model.model)[name], gradient, atol=1e-12, rtol=0, msg=name)
    scored, expected = model.forward_only(features)["logps"], alone.forward_only(features)["logps"]
    assert largest_gap(scored, expected) < 1e-12
    assert [len(x) for x in scored] == [3, 3, 3, 2, 2, 2, 1, 3]


def test_two_calls_with_the_totals_of_the_step_add_up_to_one() -> None:
    whole_loss, whole = run(DAPOLoss(), None)
    model = actor("qwen3", double=True)
    model.set_loss(DAPOLoss())
    totals = Totals(sequences=9, tokens=sum(f.num_scored for f in FEATURES))
    losses = [
        model.forward_backward(OFF_POLICY[part], advantages=ADVANTAGES[part], totals=totals).loss.item()
        for part in (slice(0, 4), slice(4, 9))
    ]
    assert sum(losses) == pytest.approx(whole_loss, abs=1e-12)
    for name, gradient in gradients(model.model).items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-12, rtol=0, msg=name)


def test_advantages_may_be_a_list_a_tensor_or_one_list_per_sequence() -> None:
    results = []
    per_token = [[a] * f.num_scored for a, f in zip(ADVANTAGES, FEATURES, strict=True)]
    for form in (ADVANTAGES, torch.tensor(ADVANTAGES), per_token):
        model = actor(tokens_per_microbatch=30)
        results.append((model.forward_backward(FEATURES, advantages=form).loss.item(), gradients(model.model)))
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(gradient[n], g) for n, g in results[0][1].items())


def test_old_logps_come_from_the_features_unless_given() -> None:
    old = [list(f.old_logps) for f in OFF_POLICY]
    losses = []
    for features, given in ((OFF_POLICY, None), (FEATURES, old), (OFF_POLICY, old)):
        model = actor(tokens_per_microbatch=30)
        result = model.forward_backward(features, advantages=ADVANTAGES, old_logps=given)
        assert not result.on_policy
        losses.append(result.loss.item())
    assert losses[0] == losses[1] == losses[2]
    on_policy = actor().forward_backward(FEATURES, advantages=ADVANTAGES)
    assert on_policy.on_policy
    assert on_policy.loss.item() == pytest.approx(-sum(ADVANTAGES) / 9, abs=1e-7)


def test_the_wrong_number_of_advantages_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="advantages has 2 entries for 9 sequences"):
        actor().forward_backward(FEATURES, advantages=[1.0, 2.0])


def test_an_input_that_is_not_a_feature_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"inputs\[0\] must be a Rollout or an InputFeature, got dict"):
        actor().forward_backward([{"input_ids": [1, 2]}], advantages=[1.0])


# --- the first step -----------------------------------------------------------------------------------------------

BLOG = InputFeature(prompt_ids=(4, 9, 17, 3, 21, 8), completion_ids=(12, 30, 5))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_the_blogs_example_has_loss_exactly_minus_the_advantage(family: str) -> None:
    # One sequence, advantage 2, a LoRA on q and v (GPT-2: its fused c_attn), old log-probs by forward_only.
    targets = ("c_attn",) if family == "gpt2" else ("q_proj", "v_proj")
    model = actor(family, lora=LoraSpec(rank=8, alpha=32.0, targets=targets))
    model.set_loss(GRPOLoss(clip_range=0.2, beta=0.1))
    model.add_metric(GRPOMetric())
    old = model.forward_only([BLOG])["logps"]
    result = model.forward_backward([BLOG], advantages=[2.0], old_logps=old)
    metrics = model.calculate_metric()
    assert result.loss.item() == -2.0
    assert result.terms["kl"].item() == 0.0
    assert metrics["train/token_ratio_max"] == 1.0
    assert metrics["train/clip_ratio"] == 0.0
    assert metrics["train/approx_kl"] == 0.0


def test_without_old_logps_the_ratio_is_one_too() -> None:
    model = actor(lora=LoraSpec(rank=2))
    model.add_metric(GRPOMetric())
    assert model.forward_backward([BLOG], advantages=[2.0]).loss.item() == -2.0
    metrics = model.calculate_metric()
    assert (metrics["train/token_ratio_max"], metrics["train/clip_ratio"]) == (1.0, 0.0)


def test_the_ratio_moves_off_one_after_a_step() -> None:
    model = actor(lora=LoraSpec(rank=2))
    model.set_optimizer("AdamW", lr=0.01)
    model.add_metric(GRPOMetric())
    old = model.forward_only([BLOG])["logps"]
    for _ in range(2):
        model.forward_backward([BLOG], advantages=[2.0], old_logps=old)
        model.clip_grad_and_step()
    model.calculate_metric()
    result = model.forward_backward([BLOG], advantages=[2.0], old_logps=old)
    new = model.forward_only([BLOG])["logps"][0]
    ratio = (new.double() - old[0].double()).exp()
    expected = -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * 2).mean().item()
    assert ratio.min() > 1.0  # a positive advantage makes the completion more likely
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert model.calculate_metric()["train/token_ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.row("R-33", "attention_dropout in the config")
def test_dropout_in_the_models_config_is_switched_off(family: str) -> None:
    rates = {"attention_dropout": 0.5}
    if family == "gpt2":
        rates = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    features = random_features(seed=12)
    noisy = tiny_model(family, **rates).train()
    # The config's dropout is real: two forwards of the plain model in train mode differ.
    ids = torch.tensor([features[0].input_ids + features[1].input_ids])
    assert not torch.equal(noisy(input_ids=ids).logits, noisy(input_ids=ids).logits)
    expected, _ = logps_one_by_one(tiny_model(family), features)
    model = TransformersModel(tiny_model(family, **rates), device="cpu")
    model.model.train()
    first, second = (torch.cat(model.forward_only(features)["logps"]) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.double() - torch.cat(expected)).abs().max() < 1e-5


# --- gradients of other set-ups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradient(lora: LoraSpec | None) -> None:
    results = []
    for checkpointing in (False, True):
        model = actor("qwen3", lora=lora, gradient_checkpointing=checkpointing)
        if lora:
            perturb_adapter(model.model)
        model.forward_backward(OFF_POLICY, advantages=ADVANTAGES)
        results.append(gradients(model.model))
    plain, recomputed = results
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=1e-6, msg=name)


def test_gradient_checkpointing_really_recomputes() -> None:
    counts = []
    for checkpointing in (False, True):
        model = actor("llama", gradient_checkpointing=checkpointing)
        calls = []
        model.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        counts.append(len(calls))
    assert counts == [1, 2]


def test_an_adapter_trains_in_float32_on_a_bfloat16_base() -> None:
    model = TransformersModel(tiny_model("llama").bfloat16(), lora=LoraSpec(rank=2), device="cpu")
    computing = {n: p for n, p in model.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in computing.values()} == {torch.bfloat16}  # no activation is brought to float32 for them
    trained = model.weights.named()
    assert trained.keys() == computing.keys() and {p.dtype for p in trained.values()} == {torch.float32}
    before = {n: p.detach().clone() for n, p in trained.items()}
    model.set_optimizer("AdamW", lr=1e-5)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()
    # AdamW's first step is lr in size, far below what bf16 could resolve next to weights of 0.1.
    moved = [(p.detach() - before[n]).abs().max().item() for n, p in trained.items() if "lora_B" in n]
    assert moved and all(m == pytest.approx(1e-5, rel=1e-2) for m in moved)


def test_everything_masked_gives_loss_zero_and_no_gradient() -> None:
    masked = [replace(f, completion_mask=(0,) * len(f.completion_ids)) for f in FEATURES]
    for loss in (GRPOLoss(), GSPOLoss(), DAPOLoss(), BNPOLoss()):
        model = actor()
        model.set_loss(loss)
        before = weights(model.model)
        result = model.forward_backward(masked, advantages=ADVANTAGES)
        report = model.clip_grad_and_step()
        assert (result.loss.item(), report.grad_norm, report.skipped) == (0.0, 0.0, False)
        assert all(torch.equal(p, before[n]) for n, p in weights(model.model).items())


def test_the_gap_to_the_sampler_is_its_mean_and_maximum() -> None:
    model = actor(tokens_per_microbatch=30)
    logps = model.forward_only(FEATURES)["logps"]
    offsets = [0.001 * (i + 1) for i in range(len(FEATURES))]
    sampler = [(x + offset).tolist() for x, offset in zip(logps, offsets, strict=True)]
    model.forward_backward(FEATURES, advantages=[1.0] * 9, sampler_logps=sampler)
    metrics = model.calculate_metric()
    tokens = [f.num_scored for f in FEATURES]
    mean = sum(o * n for o, n in zip(offsets, tokens, strict=True)) / sum(tokens)
    assert metrics["sampler/logp_gap_max"] == pytest.approx(0.009, abs=1e-5)
    assert metrics["sampler/logp_gap_mean"] == pytest.approx(mean, abs=1e-5)
    # rho = old / sampler, so the largest comes from the smallest offset
    assert metrics["sampler/rho_max"] == pytest.approx(math.exp(-0.001), abs=1e-5)
    assert metrics["sampler/rho_min"] == pytest.approx(math.exp(-0.009), abs=1e-5)
    products = [math.exp(-o * n) for o, n in zip(offsets, tokens, strict=True)]
    ess = sum(products) ** 2 / sum(p * p for p in products) / len(products)
    assert metrics["sampler/sequence_ess"] == pytest.approx(ess, abs=1e-5)
    assert "sampler/logp_gap_max" not in model.calculate_metric()  # counted since the last call


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_changes_every_parameter(family: str) -> None:
    model = actor(family)
    model.set_optimizer("AdamW", lr=1e-3)
    before = weights(model.model)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()
    same = [n for n, p in weights(model.model).items() if torch.equal(p, before[n])]
    assert same == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_two_steps_change_every_adapter_weight_and_nothing_else(family: str) -> None:
    model = actor(family, lora=LoraSpec(rank=2))
    model.set_optimizer("AdamW", lr=1e-3)
    start = weights(model.model)
    after = []
    for _ in range(2):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        model.clip_grad_and_step()
        after.append({n for n, p in weights(model.model).items() if not torch.equal(p, start[n])})
    # B is zero at the start, so A has no gradient in the first step; both move in the second.
    assert after[0] == {n for n in start if "lora_B" in n}
    assert after[1] == {n for n in start if "lora_" in n}


def test_an_adapter_is_a_function_of_its_seed_and_of_nothing_else() -> None:
    torch.manual_seed(1)
    first = weights(actor(lora=LoraSpec(rank=2, seed=7)).model)
    torch.manual_seed(2)
    drawn = torch.rand(3)
    plain = tiny_model("llama")
    torch.manual_seed(2)
    second = weights(add_lora(plain, LoraSpec(rank=2, seed=7)))
    assert torch.equal(torch.rand(3), drawn)  # the caller's random state is not moved
    assert all(torch.equal(first[n], second[n]) for n in first)
    third = weights(actor(lora=LoraSpec(rank=2, seed=8)).model)
    assert not any(torch.equal(first[n], third[n]) for n in first if "lora_A" in n)


def test_a_positive_advantage_makes_the_completion_more_likely() -> None:
    model = actor()
    model.set_optimizer("SGD", lr=0.05)
    pair = [FEATURES[0], FEATURES[3]]
    before = [x.sum().item() for x in model.forward_only(pair)["logps"]]
    model.forward_backward(pair, advantages=[1.0, -1.0])
    model.clip_grad_and_step()
    after = [x.sum().item() for x in model.forward_only(pair)["logps"]]
    assert after[0] > before[0] and after[1] < before[1]


def test_a_sequence_with_zero_advantage_adds_no_gradient() -> None:
    alone = actor(double=True)
    alone.forward_backward([FEATURES[0]], advantages=[1.0], totals=Totals(sequences=2, tokens=1))
    with_dead = actor(double=True)
    with_dead.forward_backward([FEATURES[0], FEATURES[1]], advantages=[1.0, 0.0])
    for name, gradient in gradients(alone.model).items():
        torch.testing.assert_close(gradients(with_dead.model)[name], gradient, atol=1e-14, rtol=0, msg=name)


def test_the_model_given_is_not_copied() -> None:
    plain = tiny_model("llama")
    model = TransformersModel(plain, device="cpu")
    kept = copy.deepcopy(plain.state_dict())
    model.set_optimizer("SGD", lr=0.1)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step(max_grad_norm=None)
    moved = math.sqrt(sum(float((plain.state_dict()[n] - kept[n]).pow(2).sum()) for n in kept))
    assert moved > 0.0
