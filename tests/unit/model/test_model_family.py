"""Every named loss through forward_backward: micro-batches, windows of the head and dead sequences never show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import actor, gradients, logps_one_by_one, random_features, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from gruppo.batch import Totals
from gruppo.errors import InputError
from gruppo.kernel import head as kernel_head
from gruppo.loss import (
    LOSSES,
    ClipCovLoss,
    GRPOLoss,
    KLCovLoss,
    M2POLoss,
    MaskedWeight,
    OffPolicySequenceMask,
    PolicyLoss,
    Term,
    TopEntropyLoss,
    VAPOLoss,
    part,
    sequence_level,
    token_mean,
)
from gruppo.metric import metric_for
from gruppo.model import TransformersModel
from gruppo.types import InputFeature

pytestmark = pytest.mark.slow

FEATURES = random_features(num=9, seed=11)
ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0, 0.0, -2.0, 0.75, 0.0]
OLD = [tuple(-3.0 + 0.1 * ((7 * i + 3 * j) % 11) for j in range(f.num_scored)) for i, f in enumerate(FEATURES)]
SAMPLER = [tuple(x - 0.3 + 0.07 * ((5 * i + j) % 9) for j, x in enumerate(row)) for i, row in enumerate(OLD)]

# Numbers that bite on 40 tokens: with the published ones nothing would be selected.
BITING: dict[str, Any] = {
    "clip_cov": ClipCovLoss(share=0.2, bounds=(-0.5, 1.5), clip_range=0.4),
    "kl_cov": KLCovLoss(share=0.2),
    "kl_cov everywhere": KLCovLoss(share=1.0),
    "m2po": M2POLoss(threshold=0.2),
    "mean of sequences, left out": PolicyLoss(correction=MaskedWeight(0.8, 1.2), rejected="left_out"),
    "left out": PolicyLoss(aggregate=token_mean, correction=MaskedWeight(0.8, 1.2), rejected="left_out"),
    "sequence, left out": PolicyLoss(
        level=sequence_level, correction=OffPolicySequenceMask(0.05), select=M2POLoss(threshold=0.2).select,
        rejected="left_out",
    ),
}  # fmt: skip


@part(per_token=True, zero_without_advantage=True, needs={"entropies"})
def by_entropy(log_ratio_T: Any, inputs: Any) -> Any:
    """-r*A*(1 + H), differentiated through H"""
    return -log_ratio_T.exp() * inputs.advantages * (1 + inputs.entropies)


@part(per_token=True)
def reads_entropy_undeclared(inputs: Any, log_ratio_T: Any) -> Any:
    """H*logp: entropies that a term does not declare are numbers, not functions of the weights"""
    return inputs.logps * (0.0 if inputs.entropies is None else inputs.entropies)


BITING |= {
    "entropy in the surrogate": PolicyLoss(surrogate=by_entropy),
    "entropy in a term": PolicyLoss(terms=(Term("mine", 0.1, reads_entropy_undeclared),)),
}
EVERY = {name: cls() for name, cls in LOSSES.items()} | BITING


def run(loss: Any, budget: int | None, *, old: Any = OLD, **options: Any) -> tuple[float, dict[str, Any]]:
    model = actor("gpt2", double=True, tokens_per_microbatch=budget, **options)
    model.set_loss(loss)
    result = model.forward_backward(FEATURES, advantages=ADVANTAGES, old_logps=old, sampler_logps=SAMPLER)
    return result.loss.item(), gradients(model.model)


def assert_same(got: Any, expected: Any) -> None:
    assert got[0] == pytest.approx(expected[0], abs=1e-11)
    assert set(got[1]) == set(expected[1])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, atol=1e-11, rtol=0, msg=name)


@pytest.mark.parametrize("name", EVERY)
def test_any_split_gives_the_same_loss_and_gradient(name: str) -> None:
    whole = run(EVERY[name], None)
    for budget in (1, 25):
        assert_same(run(EVERY[name], budget), whole)
    # on-policy: the old log-probs are those of the pass that trains
    assert_same(run(EVERY[name], 25, old=None), run(EVERY[name], None, old=None))


@pytest.mark.parametrize("name", EVERY)
def test_windows_of_the_head_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(EVERY[name], None, head="dense")
    monkeypatch.setattr(kernel_head, "CPU_SCRATCH", 32 * 8 * 6)  # windows shorter than a sequence
    assert_same(run(EVERY[name], 40, head="walk"), plain)


@pytest.mark.parametrize("name", EVERY)
def test_the_loss_is_that_of_the_log_probs_of_the_whole_step(name: str) -> None:
    """The loss called once, on padded rows of log-probs that were computed one by one."""
    logps, entropies = logps_one_by_one(tiny_model("gpt2").double(), FEATURES)
    width = max(map(len, logps))
    labels = torch.full((9, width), -100)
    padded = {"logps": torch.zeros(9, width, dtype=torch.float64)}
    padded["entropies"] = padded["logps"].clone()
    for i, f in enumerate(FEATURES):
        labels[i, : len(logps[i])] = torch.tensor(f.completion_ids)
        padded["logps"][i, : len(logps[i])] = logps[i]
        padded["entropies"][i, : len(logps[i])] = entropies[i]
    direct = EVERY[name]({"labels": labels}, padded, advantages=ADVANTAGES, old_logps=OLD, sampler_logps=SAMPLER)
    assert run(EVERY[name], 25)[0] == pytest.approx(direct.loss.item(), abs=1e-6)  # float32 of the given log-probs


@pytest.mark.parametrize("name", EVERY)
def test_what_a_loss_says_about_dead_sequences_is_true(name: str) -> None:
    """Left out or computed, a sequence without advantage gives the same gradient."""
    loss = EVERY[name]
    gradient_of_dead = run_one_dead(loss)
    if loss.is_zero_without_advantage:
        assert gradient_of_dead == 0.0
    else:
        assert gradient_of_dead > 1e-9 or name == "kl_cov"  # its penalty falls on chosen tokens only


def run_one_dead(loss: Any) -> float:
    """Largest gradient of the log-probs of a sequence with advantage 0, computed and not left out."""
    labels = torch.tensor([[3, 4, 5], [6, 7, 8]])
    logps = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -3.0]], dtype=torch.float64, requires_grad=True)
    old = logps.detach() - torch.tensor([[0.1, -0.2, 0.3], [0.2, -0.1, 0.15]], dtype=torch.float64)
    out = loss(
        {"labels": labels},
        {"logps": logps, "entropies": -logps},
        advantages=[0.0, 1.0],
        old_logps=old,
        sampler_logps=old - 0.05,
    )
    (gradient,) = torch.autograd.grad(out.loss, logps)
    return gradient[0].abs().max().item()


def test_selection_is_over_the_whole_step_and_not_over_live_sequences() -> None:
    """A fifth of all tokens, those of dead sequences included, as if nothing were left out."""
    loss = TopEntropyLoss(share=0.3)
    kept = run(loss, 25)
    # An entropy bonus makes every sequence count, and this one adds nothing.
    everything = TopEntropyLoss(share=0.3, entropy_coef=1e-300)
    assert_same(kept, run(everything, 25))


@pytest.mark.parametrize("seed", [85, 111])
def test_rounding_does_not_choose_among_gaps_of_one_size(seed: int) -> None:
    """Entropies of an untrained model in float32 lie close: with the widest gap, these two seeds kept other tokens."""
    draws = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=draws).tolist()

    prompts = [tuple(draw(3, 300, length)) for length in draw(2, 9, 4)]
    features = [
        InputFeature(prompt_ids=prompt, completion_ids=tuple(draw(3, 300, draw(2, 9, 1)[0])))
        for prompt in prompts
        for _ in range(8)
    ]
    advantages = torch.randn(32, generator=draws).tolist()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    found = []
    for budget in (None, 150, 61):
        torch.manual_seed(seed)
        llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        model = TransformersModel(llama, device="cpu", dtype="float32", layout="padded", tokens_per_microbatch=budget)
        model.set_loss(TopEntropyLoss(share=0.05))
        model.forward_backward(features, advantages=advantages)
        found.append(torch.cat([p.grad.flatten() for p in llama.parameters() if p.grad is not None]))
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-5 * found[0].norm()


@pytest.mark.parametrize("loss", [TopEntropyLoss(), VAPOLoss()], ids=["top_entropy", "vapo"])
def test_two_calls_add_up_with_the_totals_of_a_survey(loss: Any) -> None:
    whole = run(loss, None)
    model = actor("gpt2", double=True)
    model.set_loss(loss)
    scores = model.forward_only(FEATURES)
    lengths = [f.num_scored for f in FEATURES]
    totals = loss.survey(
        {"labels": torch.ones(sum(lengths), dtype=torch.int64), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)},
        {name: torch.cat(rows) for name, rows in scores.items()},
        advantages=ADVANTAGES,
        old_logps=OLD,
    )
    losses = [
        model.forward_backward(
            FEATURES[part], advantages=ADVANTAGES[part], old_logps=OLD[part], sampler_logps=SAMPLER[part], totals=totals
        ).loss.item()
        for part in (slice(0, 4), slice(4, 9))
    ]
    assert_same((sum(losses), gradients(model.model)), whole)


def test_two_calls_without_a_survey_are_refused() -> None:
    model = actor("gpt2", double=True)
    model.set_loss(TopEntropyLoss())
    with pytest.raises(InputError, match=r"hand the whole step to one call, or give totals made by loss\.survey"):
        model.forward_backward(FEATURES[:4], advantages=ADVANTAGES[:4], totals=Totals(sequences=9, tokens=40))


def test_a_loss_that_counts_but_does_not_look_costs_no_scoring_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = actor("gpt2", double=True)
    calls = []
    monkeypatch.setattr(model, "forward_only", lambda inputs: calls.append(len(inputs)))
    for loss in (GRPOLoss(), VAPOLoss()):
        model.set_loss(loss)
        model.forward_backward(FEATURES, advantages=ADVANTAGES, old_logps=OLD)
    assert calls == []


CLIPS_NOTHING = ("vespo", "prime", "ipo", "m2po", "kl_cov", "kl_cov everywhere", "reinforce", "gpg", "dro")
CLIPS_NOTHING += ("entropy in the surrogate",)


@pytest.mark.parametrize("name", EVERY)
def test_the_metric_of_every_loss_reports_what_it_clips(name: str) -> None:
    model = actor("gpt2", double=True)
    model.set_loss(EVERY[name])
    model.add_metric(metric_for(EVERY[name]))
    model.forward_backward(
        [replace(f, old_logps=o) for f, o in zip(FEATURES, OLD, strict=True)],
        advantages=[a or 0.1 for a in ADVANTAGES],
        sampler_logps=SAMPLER,
    )
    logps, _ = logps_one_by_one(tiny_model("gpt2").double(), FEATURES)
    found = model.calculate_metric()
    if EVERY[name].clip_range is None:  # it clips nothing, so there is nothing to report
        assert not [key for key in found if "clip" in key]
        assert name in CLIPS_NOTHING
        return
    low, high = EVERY[name].clip_range
    verdicts = []
    for row, old, advantage in zip(logps, OLD, (a or 0.1 for a in ADVANTAGES), strict=True):
        ratios = (row - torch.tensor(old)).exp().tolist()
        if name in ("gspo", "gspo_token", "luspo", "sequence, left out"):
            ratios = [(row - torch.tensor(old)).mean().exp().item()]
        both_ways = name in ("cispo", "dppo_tv", "dppo_kl")
        for r in ratios:
            too_high, too_low = r > 1 + high, r < 1 - low
            verdicts.append(too_high or too_low if both_ways else (too_high if advantage > 0 else too_low))
    assert any(verdicts) or name in ("dppo_tv", "dppo_kl")  # these cap a ratio at 20
    assert found["train/clip_ratio"] == pytest.approx(sum(verdicts) / len(verdicts))
