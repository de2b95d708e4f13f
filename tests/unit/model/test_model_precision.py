"""Training in bfloat16: float32 master weights, float32 optimizer state, float32 sums of gradients."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import actor, random_features, tiny_model

from gruppo.errors import InputError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.checkpoint import load_training_state, save_training_state
from gruppo.model.precision import in_precision
from gruppo.sampler import TorchSampler
from gruppo.task.builtin import builtin_tokenizer

FEATURES = random_features(num=6, seed=3)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]


def half_actor(**options) -> TransformersModel:
    return TransformersModel(tiny_model("llama").bfloat16(), device="cpu", **options)


def test_steps_far_below_what_a_bf16_weight_can_hold_add_up() -> None:
    """A step of 1e-5 vanishes in a bf16 weight of 0.15, whose neighbours are 5e-4 away; 200 of them are 2e-3."""
    model = half_actor()
    model.set_optimizer("SGD", lr=1e-5)
    start = {n: p.detach().clone() for n, p in model.model.named_parameters()}
    masters = {n: p.detach().clone() for n, p in model.weights.named().items()}
    for _ in range(200):
        for parameter in model.weights.parameters:
            parameter.grad = torch.ones_like(parameter)
        model.clip_grad_and_step(max_grad_norm=None)
    for name, master in model.weights.named().items():
        torch.testing.assert_close(master, masters[name] - 2e-3, rtol=0, atol=2e-5, msg=name)
    for name, parameter in model.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, model.weights.named()[name].bfloat16())
        assert not torch.equal(parameter, start[name])


def test_everything_the_optimizer_holds_is_float32() -> None:
    model = half_actor()
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()
    assert {p.dtype for g in model.optimizer.param_groups for p in g["params"]} == {torch.float32}
    held = [t for state in model.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert {t.dtype for t in held} == {torch.float32}


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    """One sequence per forward: the sum is that of the bf16 gradients in float32, not one rounded six times."""
    alone = []
    for i, feature in enumerate(FEATURES):
        model = half_actor()
        from gruppo.batch import Totals

        totals = Totals(sequences=6, tokens=sum(f.num_scored for f in FEATURES))
        model.forward_backward([feature], advantages=[ADVANTAGES[i]], totals=totals)
        alone.append({n: p.grad for n, p in model.weights.named().items()})
    split = half_actor(tokens_per_microbatch=1)
    split.forward_backward(FEATURES, advantages=ADVANTAGES)
    for name, parameter in split.weights.named().items():
        expected = torch.stack([g[name] for g in alone]).double().sum(0)
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-7, msg=name)
    assert all(p.grad is None for p in split.model.parameters())


def test_float32_weights_are_their_own_masters() -> None:
    model = actor()
    assert [a is b for a, b in zip(model.weights.parameters, model.model.parameters(), strict=True)]
    lora = actor(lora=LoraSpec(rank=2))
    trained = [p for p in lora.model.parameters() if p.requires_grad]
    assert [a is b for a, b in zip(lora.weights.parameters, trained, strict=True)] == [True] * len(trained)


def test_what_a_model_keeps_in_float32_beside_its_weights_stays_so() -> None:
    mixed = tiny_model("llama").bfloat16()
    mixed.model.norm.float()
    assert in_precision(mixed, torch.bfloat16) is None
    assert mixed.model.norm.weight.dtype == torch.float32
    named = tiny_model("llama")
    named._keep_in_fp32_modules = ["norm"]
    weights = in_precision(named, torch.bfloat16)
    assert weights is not None and {p.dtype for p in weights.parameters} == {torch.float32}
    norms = {p.dtype for n, p in named.named_parameters() if "norm" in n}
    others = {p.dtype for n, p in named.named_parameters() if "norm" not in n}
    assert (norms, others) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_float32_weights_become_masters_of_what_computes_in_bfloat16(lora: LoraSpec | None, tmp_path: Path) -> None:
    exact = {n: p.detach().clone() for n, p in actor(lora=lora).model.named_parameters()}
    model = actor(lora=lora, dtype="bfloat16")
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    for name, master in model.weights.named().items():
        assert torch.equal(master, exact[name])  # not rounded first
        assert torch.equal(dict(model.model.named_parameters())[name], exact[name].bfloat16())
    # What the adapter has learned is far below bf16; its file keeps it.
    if lora is not None:
        for master in model.weights.parameters:
            master.data.add_(1e-6)
        model.save(tmp_path / "adapter")
        fresh = actor(lora=lora, dtype="bfloat16")
        fresh.load(tmp_path / "adapter")
        for name, master in fresh.weights.named().items():
            assert torch.equal(master, exact[name] + 1e-6)


def test_masters_are_the_float32_weights_of_a_folder_so_that_small_updates_reach_some_weights(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    builtin_tokenizer().save_pretrained(tmp_path)
    exact = load_file(tmp_path / "model.safetensors")
    model = TransformersModel(str(tmp_path), dtype="bfloat16", device="cpu")
    moved, count = 0, 0
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    for name, master in model.weights.named().items():
        assert torch.equal(master, exact[name])
        # A tenth of the step between neighbours in bfloat16: from the middle between two, where a rounded weight lies,
        # it reaches neither.
        master.data.mul_(1 + 2.0**-7 / 20)
        assert torch.equal(before[name], before[name].float().mul(1 + 2.0**-7 / 20).bfloat16())
    model.weights.write_back()
    for name, p in model.model.named_parameters():
        moved, count = moved + int((p != before[name]).sum()), count + p.numel()
    assert 0.04 < moved / count < 0.12  # 0.05 to 0.1 of a step, by where in its binade a weight lies
    assert TorchSampler(str(tmp_path), dtype="bfloat16", device="cpu").model._weights is None  # type: ignore[attr-defined]


def test_a_checkpoint_holds_the_masters_and_restores_them_to_the_bit(tmp_path: Path) -> None:
    model = half_actor()
    for _ in range(3):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        model.clip_grad_and_step()
    save_training_state(model.weights, model.optimizer, tmp_path)
    other = half_actor()
    load_training_state(other.weights, other.optimizer, tmp_path)
    for one, two in ((model, other), (other, model)):
        for name, master in one.weights.named().items():
            assert torch.equal(master, two.weights.named()[name])
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), other.model.parameters(), strict=True))
    for each in (model, other):
        each.forward_backward(FEATURES, advantages=ADVANTAGES)
        each.clip_grad_and_step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.weights.parameters, other.weights.parameters, strict=True)
    )  # fmt: skip


def test_loading_a_model_moves_the_masters_too(tmp_path: Path) -> None:
    model, other = half_actor(), TransformersModel(tiny_model("llama", seed=1).bfloat16(), device="cpu")
    assert not torch.equal(model.weights.parameters[0], other.weights.parameters[0])
    other.save(tmp_path / "saved")
    model.load(tmp_path / "saved")
    for a, b in zip(model.weights.parameters, other.model.parameters(), strict=True):
        assert torch.equal(a, b.float())


def test_an_optimizer_over_half_precision_weights_is_refused() -> None:
    model = half_actor()
    with pytest.raises(InputError, match=r'made over half-precision weights.*set_optimizer\("AdamW", lr=\.\.\.\)'):
        model.set_optimizer(torch.optim.AdamW(model.model.parameters(), lr=1e-5))
    model.set_optimizer(torch.optim.AdamW(model.weights.parameters, lr=1e-5))  # the remedy it names


def test_a_non_finite_gradient_of_a_half_precision_weight_is_named() -> None:
    model = half_actor()
    model.set_optimizer("AdamW", lr=0.01)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.weights.named()["model.layers.1.mlp.up_proj.weight"].grad[3, 5] = float("nan")
    before = [p.detach().clone() for p in model.weights.parameters]
    report = model.clip_grad_and_step()
    assert (report.skipped, report.culprit) == (True, "model.layers.1.mlp.up_proj.weight")
    assert all(torch.equal(a, b) for a, b in zip(model.weights.parameters, before, strict=True))


def test_a_step_without_any_gradient_has_no_norm() -> None:
    model = actor()
    model.forward_backward(FEATURES, advantages=[0.0] * 6)
    report = model.clip_grad_and_step()
    assert (report.grad_norm, report.skipped) == (None, False)
