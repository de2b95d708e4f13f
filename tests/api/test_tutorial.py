"""The calls of the post "GRPO 101" run with the functions of docs/tutorial.md and give what plain computations give."""

import ast
import copy
import re
from math import exp, log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gruppo.loss import GRPOLoss

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
NAMES = ["prepare_inputs", "compute_log_probs", "grpo_loss", "grpo_loss_with_clip", "grpo_loss_with_kl"]
POST = {"torch": torch, "F": F}
"""The functions that the page defines, with the tokenizer that they read."""
for statement in ast.parse("".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))).body:
    if isinstance(statement, ast.FunctionDef) and statement.name in (*NAMES, "log_probs_of_both"):
        exec(ast.unparse(statement), POST)
prepare_inputs, compute_log_probs, grpo_loss, grpo_loss_with_clip, grpo_loss_with_kl = (POST[name] for name in NAMES)

WORDS = ["<unk>", "<bos>", "<eos>", "The", "quick", "brown", "fox", "jumped", "over", "the", "fence", "and"]
BOS, EOS = WORDS.index("<bos>"), WORDS.index("<eos>")
PROMPT = "The quick brown fox jumped over the "
PROMPT_IDS, COMPLETION_IDS = [BOS, 3, 4, 5, 6, 7, 8, 9], [10, 11]  # of "fence and"
POSTS_LOSSES = [grpo_loss, grpo_loss_with_clip, grpo_loss_with_kl]


def word_tokenizer(template="<bos> $A"):
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(word, WORDS.index(word)) for word in ("<bos>", "<eos>")]
        made.post_processor = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    made = word_tokenizer()
    monkeypatch.setitem(POST, "tokenizer", made)
    return made


@pytest.fixture(scope="module")
def model_str(tmp_path_factory):
    """A model folder in place of the one the post downloads."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        attention_dropout=0.5,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def models_of_the_post(model_str):
    """Policy and reference, by the post's own lines."""
    base_model = AutoModelForCausalLM.from_pretrained(model_str)
    POST["tokenizer"] = AutoTokenizer.from_pretrained(model_str)

    # Reference model: frozen copy
    ref_model = copy.deepcopy(base_model)

    # Policy model: base + trainable LoRA adapter
    torch.manual_seed(2)  # of the adapter: one token of the completion gains, the other loses
    lora_config = LoraConfig(
        r=8,  # Rank of update matrices
        lora_alpha=32,  # Alpha scaling factor
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.1,
        init_lora_weights=False,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base_model, lora_config)
    return model, ref_model


# --- the post's calls ------------------------------------------------------------------------------------------------


def test_the_first_output_of_the_post_is_exactly_minus_two(models_of_the_post):
    _, ref_model = models_of_the_post
    prompt = PROMPT
    loss = grpo_loss(ref_model, ref_model, prompt, "fence and", advantage=2.0)
    assert torch.equal(loss, torch.tensor(-2.0))
    assert repr(loss.detach()) == "tensor(-2.)"


def test_the_training_step_of_the_post(models_of_the_post):
    model, ref_model = models_of_the_post
    inputs = prepare_inputs(PROMPT, "fence and")
    before = completion_logp(model, *inputs)
    frozen = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    # Example: training on a good completion (positive advantage)
    loss = grpo_loss_with_kl(
        model,
        ref_model,
        prompt="The quick brown fox jumped over the ",
        completion="fence and",
        advantage=2.0,
        epsilon=0.2,
        beta=0.1,
    )

    # Backprop and update
    loss.backward()
    optimizer.step()

    trained = [p.grad for name, p in model.named_parameters() if "lora_" in name]
    assert len(trained) == 8 and all(grad.abs().max() > 0 for grad in trained)  # A and B, q and v, two layers
    assert all(p.grad is None for p in ref_model.parameters())
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert completion_logp(model, *inputs) > before + 1e-4


def test_a_step_on_a_negative_advantage_lowers_the_log_prob(models_of_the_post):
    model, ref_model = models_of_the_post
    inputs = prepare_inputs(PROMPT, "fence and")
    before = completion_logp(model, *inputs)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    grpo_loss(model, ref_model, PROMPT, "fence and", advantage=-2.0).backward()
    optimizer.step()
    assert completion_logp(model, *inputs) < before - 1e-4


def completion_logp(model, input_ids, attention_mask, completion_mask):
    with torch.no_grad():
        return float((compute_log_probs(model, input_ids, attention_mask) * completion_mask).sum())


# --- against a plain computation -------------------------------------------------------------------------------------


def logps_prefix_by_prefix(model, prompt_ids, completion_ids):
    """Each token scored by a run of the model over nothing but the tokens before it: nothing to shift."""
    ids, logps = list(prompt_ids), []
    for token in completion_ids:
        logps.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
        ids.append(token)
    return torch.stack(logps)


def plain_loss(name, new, ref, advantage):
    """The formulas of the post on the log-probs of the completion alone."""
    ratio, delta = (new - ref).exp(), new - ref
    if name == "grpo_loss":
        return (-ratio * advantage).mean()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    if name == "grpo_loss_with_kl":
        loss = loss + 0.3 * ((-delta).exp() + delta - 1)
    return loss.mean()


OPTIONS = {
    "grpo_loss": {},
    "grpo_loss_with_clip": {"epsilon": 0.1},
    "grpo_loss_with_kl": {"epsilon": 0.1, "beta": 0.3},
}


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("loss_of", POSTS_LOSSES)
def test_value_and_gradient_are_those_of_plain_torch_in_float64(models_of_the_post, loss_of, advantage):
    model, ref_model = (m.double().eval() for m in models_of_the_post)
    name = loss_of.__name__
    ours = loss_of(model, ref_model, PROMPT, "fence and", advantage, **OPTIONS[name])
    new = logps_prefix_by_prefix(model, PROMPT_IDS, COMPLETION_IDS)
    ref = logps_prefix_by_prefix(ref_model, PROMPT_IDS, COMPLETION_IDS).detach()
    theirs = plain_loss(name, new, ref, advantage)
    first, second = (new - ref).exp().tolist()
    assert first > 1.1 and second < 0.9  # either sign of the advantage clips one of them
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)  # Llama's norms are float32 in every model
    trained = [p for p in model.parameters() if p.requires_grad]
    for mine, plain in zip(torch.autograd.grad(ours, trained), torch.autograd.grad(theirs, trained), strict=True):
        assert plain.abs().max() > 0.01
        assert (mine - plain).abs().max() < 1e-5 * plain.abs().max()


@pytest.mark.parametrize("loss_of", POSTS_LOSSES)
def test_value_in_float32_is_that_of_plain_torch_in_float64(models_of_the_post, loss_of):
    model, ref_model = models_of_the_post
    ours = loss_of(model, ref_model, PROMPT, "fence and", 2.0, **OPTIONS[loss_of.__name__])
    assert ours.dtype == torch.float32
    model, ref_model = model.double().eval(), ref_model.double().eval()
    new, ref = (logps_prefix_by_prefix(m, PROMPT_IDS, COMPLETION_IDS) for m in (model, ref_model))
    assert ours.item() == pytest.approx(plain_loss(loss_of.__name__, new, ref, 2.0).item(), rel=1e-5)


def test_the_mean_over_a_group_is_grpo_loss_of_the_batch(models_of_the_post):
    """Rows of unequal length, padded on the right; the pads hold log-probs that no loss may see."""
    model, ref_model = models_of_the_post
    group, advantages = ["fence and", "fox", "the fence and the fox"], [1.5, -0.5, -1.0]
    one_by_one = torch.stack(
        [grpo_loss_with_kl(model, ref_model, PROMPT, c, a) for c, a in zip(group, advantages, strict=True)]
    ).mean()
    labels, logps, ref_logps = (torch.full((3, 13), fill) for fill in (-100, float("nan"), float("nan")))
    for row, completion in enumerate(group):
        input_ids, attention_mask, mask = prepare_inputs(PROMPT, completion)
        width = input_ids.shape[1]
        labels[row, :width] = input_ids[0].masked_fill(mask == 0, -100)
        for values, scored_by in ((logps, model), (ref_logps, ref_model)):
            values[row, :width] = compute_log_probs(scored_by, input_ids, attention_mask)[0].detach()
    at_once = GRPOLoss(clip_range=0.2, beta=0.1)(
        {"labels": labels}, {"logps": logps}, advantages=advantages, old_logps=ref_logps, ref_logps=ref_logps
    )
    assert one_by_one.item() == pytest.approx(at_once.loss.item(), rel=1e-5)


# --- by hand ---------------------------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """A model whose next-token probabilities are rows of a table: `follows[word] = {next word: probability}`."""

    def __init__(self, follows):
        super().__init__()
        table = torch.zeros(len(WORDS), len(WORDS), dtype=torch.float64)
        for word, chances in follows.items():
            rest = (1 - sum(chances.values())) / (len(WORDS) - len(chances))
            table[WORDS.index(word)] = rest
            for follower, chance in chances.items():
                table[WORDS.index(word), WORDS.index(follower)] = chance
        self.table = nn.Parameter(table.log())

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=F.embedding(input_ids, self.table))


REFERENCE = {"<bos>": {"the": 0.9}, "the": {"fox": 0.4, "fence": 0.5}, "fox": {"jumped": 0.25}, "fence": {"and": 0.5}}


def moved(fox, jumped):
    """A policy that gives `fox` and `jumped` other chances than the reference does."""
    return Bigram(REFERENCE | {"the": {"fox": fox}, "fox": {"jumped": jumped}})


def test_a_token_is_scored_by_what_stands_before_it():
    input_ids, attention_mask, _ = prepare_inputs("the", "fox jumped")
    logps = compute_log_probs(Bigram(REFERENCE), input_ids, attention_mask)
    assert logps.shape == input_ids.shape
    assert logps[0].tolist() == pytest.approx([0.0, log(0.9), log(0.4), log(0.25)], abs=1e-12)


@pytest.mark.parametrize(
    ("loss_of", "advantage", "expected"),
    [
        # ratios 0.6 / 0.4 = 1.5 and 0.125 / 0.25 = 0.5
        (grpo_loss, 2.0, -2.0 * (1.5 + 0.5) / 2),
        (grpo_loss, -2.0, 2.0 * (1.5 + 0.5) / 2),
        (grpo_loss_with_clip, 2.0, -2.0 * (1.2 + 0.5) / 2),  # the gain of the first is cut, the loss of the second not
        (grpo_loss_with_clip, -2.0, 2.0 * (1.5 + 0.8) / 2),  # the other way round
        # k3 of ratio 1.5 is 1 / 1.5 - 1 + log 1.5 = 0.07213, of ratio 0.5 it is 2 - 1 - log 2 = 0.30685
        (grpo_loss_with_kl, 2.0, -1.7 + 0.1 * (2 / 3 - 1 + log(1.5) + 1 - log(2)) / 2),
        (grpo_loss_with_kl, -2.0, 2.3 + 0.1 * (2 / 3 - 1 + log(1.5) + 1 - log(2)) / 2),
    ],
)
def test_the_three_losses_of_two_tokens_by_hand(loss_of, advantage, expected):
    policy, reference = moved(fox=0.6, jumped=0.125), Bigram(REFERENCE)
    loss = loss_of(policy, reference, "the", "fox jumped", advantage)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_epsilon_and_beta_by_hand():
    policy, reference = moved(fox=0.6, jumped=0.125), Bigram(REFERENCE)
    clipped = grpo_loss_with_clip(policy, reference, "the", "fox jumped", 1.0, epsilon=0.4)
    assert clipped.item() == pytest.approx(-(1.4 + 0.5) / 2, abs=1e-12)
    kl = (1 / 1.5 + log(1.5) + 2 + log(0.5) - 2) / 2
    penalised = grpo_loss_with_kl(policy, reference, "the", "fox jumped", 1.0, epsilon=0.4, beta=3.0)
    assert penalised.item() == pytest.approx(-(1.4 + 0.5) / 2 + 3.0 * kl, abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "slopes"),
    [
        (2.0, [0.0, -0.5 * 2.0]),  # d/dlogp of -r*A is -r*A; above 1.2 nothing is gained by going on
        (-2.0, [1.5 * 2.0, 0.0]),
    ],
)
def test_the_clip_stops_the_token_that_has_gone_far_enough(advantage, slopes):
    policy, reference = moved(fox=0.6, jumped=0.125), Bigram(REFERENCE)
    grpo_loss_with_clip(policy, reference, "the", "fox jumped", advantage).backward()
    # A logit of the token's row moves its log-prob by 1 - p, and the loss is a mean over two tokens.
    for before, token, p, slope in (("the", "fox", 0.6, slopes[0]), ("fox", "jumped", 0.125, slopes[1])):
        grad = policy.table.grad[WORDS.index(before), WORDS.index(token)].item()
        assert grad == pytest.approx(slope / 2 * (1 - p), abs=1e-12)


@pytest.mark.parametrize("factor", [2.0, 20.0])
def test_the_kl_penalty_is_steep_where_the_policy_forgets(factor):
    """delta = -log(factor): factor - 1 - log(factor); delta = +log(factor): 1/factor - 1 + log(factor)."""
    reference = Bigram(REFERENCE | {"the": {"fox": 0.04}})
    for chance, expected in (
        (0.04 / factor, factor - 1 - log(factor)),
        (0.04 * factor, exp(-log(factor)) - 1 + log(factor)),
    ):
        policy = Bigram(REFERENCE | {"the": {"fox": chance}})
        loss = grpo_loss_with_kl(policy, reference, "the", "fox", advantage=0.0, beta=1.0)
        assert loss.item() == pytest.approx(expected, abs=1e-9)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_the_completion_gets_no_start_token_of_its_own():
    input_ids, attention_mask, completion_mask = prepare_inputs(PROMPT, "fence and")
    assert input_ids.tolist() == [PROMPT_IDS + COMPLETION_IDS]
    assert attention_mask.tolist() == [[1] * 10]
    assert completion_mask.tolist() == [0.0] * 8 + [1.0] * 2 and completion_mask.dtype == torch.float32


def test_a_tokenizer_without_start_token_needs_none():
    POST["tokenizer"] = word_tokenizer(template=None)
    input_ids, _, completion_mask = prepare_inputs("the", "fence and")
    assert (input_ids.tolist(), completion_mask.tolist()) == ([[9, 10, 11]], [0.0, 1.0, 1.0])
