"""Shared prompts give the log-probs, losses and gradients of sequences on their own; who cannot share says so."""

import copy
import logging
import random

import pytest
import torch
from tiny_models import VOCABULARY, actor, gradients, largest_gap, logps_one_by_one, perturb_adapter, tiny_model
from transformers import Llama4ForCausalLM, Llama4TextConfig

from gruppo.errors import InputError
from gruppo.loss import DAPOLoss, GRPOLoss, GSPOLoss
from gruppo.metric import GRPOMetric
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model import attention_hook as model_attention
from gruppo.model.plan import plan_rows
from gruppo.types import InputFeature

# Ragged prompts (one of a single token) and completions (some of one token, one repeated, one with masked tokens), the
# groups not next to each other. The windows of the Gemma and Mistral models (4) are shorter than most of these.
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "gpt2"]


def groups(seed=0, prompts=(9, 4, 1, 6), size=4):
    rng = random.Random(seed)
    tokens = lambda n: tuple(rng.randrange(3, VOCABULARY) for _ in range(n))  # noqa: E731
    made = []
    for length in prompts:
        prompt = tokens(length)
        made += [InputFeature(prompt_ids=prompt, completion_ids=tokens(rng.randint(1, 8))) for _ in range(size - 1)]
        made.append(InputFeature(prompt_ids=prompt, completion_ids=tokens(1)))
    made.append(made[0])
    masked = InputFeature(prompt_ids=made[0].prompt_ids, completion_ids=tokens(5), completion_mask=(1, 0, 0, 1, 1))
    made.append(masked)
    rng.shuffle(made)
    old = [tuple(-3 - rng.random() for _ in range(f.num_scored)) for f in made]
    return made, old, [rng.uniform(-1, 1) for _ in made]


def outcome(model, loss):
    features, old, advantages = groups()
    model.set_loss(loss)
    logps = model.forward_only(features)["logps"]
    result = model.forward_backward(features, advantages=advantages, old_logps=old)
    assert_shares(model)
    return logps, result.loss, gradients(model.model)


def assert_shares(model):
    """A model that fails the comparison would fall back, and equal the padded layout for the wrong reason."""
    assert (model.logp_model.base.config._attn_implementation == model_attention.NAME) == (
        model.planner.layout == "shared"
    )


def assert_equal_outcomes(ours, theirs):
    assert largest_gap(ours[0], theirs[0]) < 1e-5
    assert float((ours[1] - theirs[1]).abs()) < 1e-5
    assert ours[2].keys() == theirs[2].keys()
    for name, gradient in theirs[2].items():
        torch.testing.assert_close(ours[2][name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


LOSSES = {"grpo": GRPOLoss(), "gspo, kl, entropy": GSPOLoss(clip_range=3e-1, beta=0.1, entropy_coef=0.01)}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("budget", [None, 17], ids=["whole", "split groups"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_give_one_gradient(family, budget, loss):
    shared = outcome(actor(family, layout="shared", tokens_per_microbatch=budget), loss)
    for layout in ("padded", "packed"):
        assert_equal_outcomes(shared, outcome(actor(family, layout=layout), loss))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_with_an_adapter_too(family):
    results = []
    for layout in ("shared", "padded"):
        model = actor(family, layout=layout, lora=LoraSpec(rank=2), tokens_per_microbatch=40)
        perturb_adapter(model.model)
        results.append(outcome(model, GSPOLoss(beta=0.1)))
    assert_equal_outcomes(*results)


@pytest.mark.parametrize("options", [{}, {"lora": LoraSpec(rank=2)}], ids=["full", "lora"])
def test_recomputed_activations_see_the_same_prompts(options):
    shared = outcome(actor("qwen3", layout="shared", gradient_checkpointing=True, **options), GRPOLoss())
    assert_equal_outcomes(shared, outcome(actor("qwen3", layout="padded", **options), GRPOLoss()))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_logps_are_those_of_each_sequence_alone(family):
    features = [f for f in groups()[0] if f.completion_mask is None]
    model = actor(family, layout="shared")
    expected = logps_one_by_one(tiny_model(family), features)
    assert largest_gap(model.forward_only(features)["logps"], expected[0]) < 1e-5
    assert largest_gap(model.reference_logps(features), expected[0]) < 1e-5  # a copy, made before or after
    assert_shares(model)


def test_the_head_that_walks_reads_shared_rows():
    walked = outcome(actor("qwen3", layout="shared", head="walk"), DAPOLoss())
    assert_equal_outcomes(walked, outcome(actor("qwen3", layout="padded", head="dense"), DAPOLoss()))


def test_metrics_are_those_of_the_padded_layout():
    features, old, advantages = groups()
    reported = []
    for layout in ("shared", "padded"):
        model = actor("llama", layout=layout, tokens_per_microbatch=30)
        model.add_metric(GRPOMetric(top_k_kl=3))
        model.forward_backward(features, advantages=advantages, old_logps=old)
        reported.append({k: v for k, v in model.calculate_metric().items() if isinstance(v, float)})
    assert reported[0] == pytest.approx(reported[1], abs=1e-5)


def count_slots(model):
    seen = []
    model.model.register_forward_pre_hook(
        lambda _m, _a, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    return seen


def test_a_prompt_runs_once():
    """Two groups: prompts of 10 and 7 tokens; completions of 5 tokens have 4 slots each."""
    features = [
        InputFeature(prompt_ids=tuple(range(3, 3 + n)), completion_ids=(i, i, i, i, i))
        for n in (10, 7)
        for i in range(3, 9)
    ]
    slots = {}
    for layout in ("padded", "shared"):
        model = actor("llama", layout=layout)
        model.forward_only(features)  # the first call also compares
        seen = count_slots(model)
        model.forward_only(features)
        slots[layout] = seen
    assert slots["padded"] == [12 * 14]
    assert slots["shared"] == [2 * 34]  # 10 + 24 and 7 + 24: two rows of the longer


def test_auto_shares_where_the_estimate_says_so():
    long = [[511] * 8]  # eight completions of 512
    assert plan_rows([1024], long, hidden_size=1024, is_cuda=True).saving == pytest.approx(8 * 1535 / (1024 + 8 * 511))
    assert plan_rows([1024], [[511]], hidden_size=1024, is_cuda=True).saving == 1  # nobody to share with
    cpu = plan_rows([64], [[31] * 8], hidden_size=1024, is_cuda=False)
    expected = 8 * 95 * (1 + 95 / 3072) / ((64 + 248) * (1 + 312 / 3072))
    assert (cpu.row_slots, cpu.saving) == (312, pytest.approx(expected))
    wide = plan_rows([64], [[511] * 8], hidden_size=64, is_cuda=False)  # masked scores would cost more than they save
    assert wide.row_slots == 64 + 511 * 8 // 4 and wide.saving < 1.2
    assert plan_rows([6], [[3] * 4], hidden_size=64, is_cuda=False).saving == 1  # too small to bother


def test_auto_pads_what_does_not_share():
    model = actor("llama", layout="auto")
    features = [InputFeature(prompt_ids=(i, 4), completion_ids=(5, 6)) for i in range(3, 9)]
    (batch,) = model.planner.split([f.rollout() for f in features])
    assert batch.shared is None
    assert model.model.config._attn_implementation == "sdpa"


def test_sampling_and_padding_do_not_notice():
    model = actor("qwen3", layout="shared")
    tokens, mask = torch.tensor([[0, 5, 6, 7], [4, 5, 6, 8]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        before = model.model(input_ids=tokens, attention_mask=mask, use_cache=True)
        model.forward_only(groups()[0])
        assert model.model.config._attn_implementation == model_attention.NAME
        after = model.model(input_ids=tokens, attention_mask=mask, use_cache=True)
    assert torch.equal(before.logits[:, 1:], after.logits[:, 1:])


def falls_back(model, caplog):
    """The one line that says why, after two calls whose numbers are those of the padded layout."""
    features = groups()[0]
    with caplog.at_level(logging.WARNING, logger="gruppo"):
        logps = [model.forward_only(features)["logps"] for _ in range(2)]
    model.planner.layout = "padded"
    assert largest_gap(logps[0], model.forward_only(features)["logps"]) == 0
    lines = [r.getMessage() for r in caplog.records if "not shared" in r.getMessage()]
    assert len(lines) == 1
    return lines[0]


def test_eager_attention_falls_back_by_name(caplog):
    model = TransformersModel(tiny_model("llama", attn_implementation="eager"), device="cpu", layout="shared")
    assert "it runs 'eager' attention" in falls_back(model, caplog)


def test_chunked_attention_falls_back_by_name(caplog):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    llama = Llama4ForCausalLM(Llama4TextConfig(num_local_experts=2, attention_chunk_size=8, pad_token_id=0, **sizes))
    model = TransformersModel(llama.eval(), device="cpu", layout="shared")
    assert "chunked_attention" in falls_back(model, caplog)


def test_a_model_that_ignores_the_rows_is_found_out(caplog, monkeypatch):
    """As a family would be that does not hand its keywords on to its attention."""
    attend = model_attention.attend
    monkeypatch.setattr(model_attention, "attend", lambda *a, shared_prompts=None, **k: attend(*a, **k))
    model = TransformersModel(tiny_model("llama"), device="cpu", layout="shared")
    assert "its log-probs differ by" in falls_back(model, caplog)
    assert model.model.config._attn_implementation == "sdpa"


def test_packed_sequences_that_see_each_other_are_found_out(caplog):
    """Falcon's attention does not read positions: in one row it would run over the boundaries."""
    features, old, advantages = groups()
    results = []
    for layout in ("packed", "padded"):
        model = TransformersModel(tiny_model("falcon"), device="cpu", layout=layout, tokens_per_microbatch=40)
        model.set_loss(GRPOLoss(beta=0.1))  # the reference is a copy, made before the comparison
        logps = model.forward_only(features)["logps"]
        result = model.forward_backward(features, advantages=advantages, old_logps=old)
        results.append((logps, result.loss, gradients(model.model)))
    assert_equal_outcomes(*results)
    assert largest_gap(results[0][0], results[1][0]) == 0
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert lines[0].startswith(
        "FalconForCausalLM: sequences are not packed into one row, since its log-probs differ by"
    )


def test_an_unknown_layout_is_refused():
    with pytest.raises(InputError, match="layout must be one of auto, padded, packed, shared, got 'dense'"):
        actor("llama", layout="dense")


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_rounding_is_no_reason_to_pad(layout, lora, caplog):
    """Weights as sharp as those of a trained model: in bfloat16 single log-probs are half a nat off in any layout."""
    llama = tiny_model("llama", num_hidden_layers=8).bfloat16()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter *= 4
        llama.lm_head.weight *= 4
    features, _, _ = groups()
    whole = [
        TransformersModel(copy.deepcopy(llama), device="cpu", layout=each, lora=lora) for each in (layout, "padded")
    ]
    ours, theirs = (model.forward_only(features)["logps"] for model in whole)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert largest_gap(ours, theirs) > 0.2
