"""Optimizer steps: the schedule by hand, clipping by hand, and the guard against non-finite gradients."""

import math

import pytest
import torch
from tiny_models import actor, gradients, random_features, weights

from gruppo.errors import InputError
from gruppo.model import LoraSpec
from gruppo.model.optim import schedule_factor

FEATURES = random_features(num=4, seed=31)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5]


def lrs(schedule: str, num: int, **options: int) -> list[float]:
    model = actor(lora=LoraSpec(rank=1))
    model.set_optimizer("SGD", lr=0.8)
    model.set_lr_scheduler(schedule, **options)  # type: ignore[arg-type]
    seen = []
    for _ in range(num):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        seen.append(model.clip_grad_and_step().lr)
    return seen


def test_warm_up_rises_linearly_and_then_stays() -> None:
    assert lrs("constant", 5, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_the_linear_schedule_falls_to_zero_over_the_steps_after_the_warm_up() -> None:
    # After 2 warm-up steps, 4 steps at progress 0, 1/4, 2/4, 3/4.
    assert lrs("linear", 6, warmup_steps=2, total_steps=6) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])


def test_the_cosine_schedule_is_half_a_cosine() -> None:
    half = [0.5 * (1 + math.cos(math.pi * x)) for x in (0.0, 0.25, 0.5, 0.75)]
    assert half[2] == pytest.approx(0.5)
    assert lrs("cosine", 5, warmup_steps=1, total_steps=5) == pytest.approx([0.8 * x for x in [1.0, *half]])


def test_a_schedule_past_its_end_stays_at_zero() -> None:
    assert schedule_factor("linear", 9, 0, 4) == 0.0
    assert schedule_factor("cosine", 9, 0, 4) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_schedule_needs_an_end(schedule: str) -> None:
    with pytest.raises(InputError, match="needs total_steps"):
        actor().set_lr_scheduler(schedule)  # type: ignore[arg-type]


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'constant', 'linear' or 'cosine', got 'cosinus'"):
        actor().set_lr_scheduler("cosinus")  # type: ignore[arg-type]


def test_sgd_moves_each_weight_by_lr_times_its_gradient() -> None:
    model = actor()
    model.set_optimizer("SGD", lr=0.5)
    start = weights(model.model)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    grads = gradients(model.model)
    report = model.clip_grad_and_step(max_grad_norm=None)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in grads.values()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    for name, parameter in weights(model.model).items():
        torch.testing.assert_close(parameter, start[name] - 0.5 * grads[name], msg=name)


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    model = actor()
    model.set_optimizer("SGD", lr=1.0)
    start = weights(model.model)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    grads = gradients(model.model)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in grads.values()))
    report = model.clip_grad_and_step(max_grad_norm=norm / 4)
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)  # the norm before clipping
    moved = {n: start[n] - p for n, p in weights(model.model).items()}
    for name, gradient in grads.items():
        torch.testing.assert_close(moved[name], gradient / 4, atol=1e-6, rtol=1e-4, msg=name)


def test_adamw_without_set_optimizer_starts_with_a_step_of_1e_6() -> None:
    model = actor()
    start = weights(model.model)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    assert model.clip_grad_and_step().lr == 1e-6
    moved = max(float((p - start[n]).abs().max()) for n, p in weights(model.model).items())
    assert moved == pytest.approx(1e-6, rel=0.1)  # AdamW's first step is lr * sign(gradient)


def test_an_adapter_without_set_optimizer_starts_with_1e_5() -> None:
    model = actor(lora=LoraSpec(rank=1))
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    assert model.clip_grad_and_step().lr == 1e-5


def test_an_optimizer_object_is_taken_as_it_is() -> None:
    model = actor()
    mine = torch.optim.SGD([model.model.lm_head.weight], lr=0.25)
    model.set_optimizer(mine)
    start = weights(model.model)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    assert model.clip_grad_and_step().lr == 0.25
    moved = [n for n, p in weights(model.model).items() if not torch.equal(p, start[n])]
    assert moved == ["lm_head.weight"]


def test_gradients_of_weights_outside_the_optimizer_do_not_pile_up() -> None:
    model = actor()
    model.set_optimizer(torch.optim.SGD([model.model.lm_head.weight], lr=0.0))
    norms = []
    for _ in range(2):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
        norms.append(gradients(model.model)["model.embed_tokens.weight"].norm().item())
        model.clip_grad_and_step()
    assert norms[0] == norms[1]


def test_options_beside_an_optimizer_object_are_refused() -> None:
    model = actor()
    with pytest.raises(InputError, match=r"options \['lr'\] go with an optimizer's name"):
        model.set_optimizer(torch.optim.SGD(model.model.parameters(), lr=0.1), lr=0.2)


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'AdamWW' is not in torch\.optim"):
        actor().set_optimizer("AdamWW")


def test_a_frozen_model_has_nothing_to_train() -> None:
    model = actor()
    model.model.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter that trains"):
        model.set_optimizer()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.row("R-29", "NaN and inf in one gradient")
def test_a_non_finite_gradient_skips_the_step_and_is_named(poison: float) -> None:
    model = actor()
    model.set_optimizer("AdamW", lr=0.01)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()  # the optimizer has state
    start, state = weights(model.model), torch.cat([s["exp_avg"].flatten() for s in model.optimizer.state.values()])
    culprit = "model.layers.1.mlp.up_proj.weight"

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt[3, 5] = poison
        return spoilt

    hook = model.model.get_parameter(culprit).register_hook(spoil)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    report = model.clip_grad_and_step()
    hook.remove()
    assert (report.skipped, report.culprit, model.version) == (True, culprit, 1)
    assert all(torch.equal(p, start[n]) for n, p in weights(model.model).items())
    assert torch.equal(torch.cat([s["exp_avg"].flatten() for s in model.optimizer.state.values()]), state)
    assert gradients(model.model) == {}  # nothing of it is left for the next step
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    assert not model.clip_grad_and_step().skipped
    assert model.version == 2


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    model = actor()
    model.set_optimizer("SGD", lr=1.0)
    model.set_lr_scheduler("constant", warmup_steps=4)
    hook = model.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    first = model.clip_grad_and_step()
    hook.remove()
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    second = model.clip_grad_and_step()
    assert (first.lr, second.lr) == (0.25, 0.25)


@pytest.mark.row("R-31", "a gradient times a million")
def test_a_gradient_a_million_times_too_large_is_clipped_to_the_norm() -> None:
    model = actor()
    model.set_optimizer("SGD", lr=1.0)
    start = weights(model.model)
    for parameter in model.model.parameters():
        parameter.register_hook(lambda g: g * 1e6)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step(max_grad_norm=0.5)
    moved = math.sqrt(sum(float((p - start[n]).double().pow(2).sum()) for n, p in weights(model.model).items()))
    assert moved == pytest.approx(0.5, rel=1e-4)
