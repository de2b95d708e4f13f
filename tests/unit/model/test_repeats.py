"""Equal sequences of a batch run through the body once; losses and gradients are those of running each."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from gruppo.kernel import linear_logps_and_entropy
from gruppo.kernel.logps import dense_logps_and_entropy
from gruppo.loss import GRPOLoss, GSPOLoss
from gruppo.model import TransformersModel, plan
from gruppo.types import InputFeature

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}

# Repeats within a prompt; the last two differ only in their last token, which no slot of the body sees.
ROWS = [((1, 2), (3, 4)), ((1, 2), (3, 4)), ((1, 2), (5,)), ((1, 2), (3, 4)), ((6,), (7, 8, 9)), ((6,), (7, 8, 10))]
ADVANTAGES = [1.0, -0.5, 0.25, 2.0, -1.0, 0.5]


def gradients(loss):
    torch.manual_seed(0)
    model = TransformersModel(AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)), device="cpu", layout="padded")
    model.set_loss(loss)
    features = [
        InputFeature(prompt_ids=p, completion_ids=c, old_logps=tuple(-3.0 - 0.1 * i for i in range(len(c))))
        for p, c in ROWS
    ]
    output = model.forward_backward(features, advantages=ADVANTAGES)
    return output.loss, {n: p.grad for n, p in model.model.named_parameters()}, model.forward_only(features)["logps"]


@pytest.mark.parametrize("loss", [GRPOLoss(), GSPOLoss(beta=0.1, entropy_coef=0.01)], ids=["grpo", "gspo, kl, entropy"])
def test_repeated_sequences_give_the_loss_and_gradients_of_running_each(monkeypatch, loss):
    once = gradients(loss)
    whole_pack = plan.pack

    def without_kinds(features):
        batch = whole_pack(features)
        object.__setattr__(batch, "distinct", None)
        return batch

    monkeypatch.setattr(plan, "pack", without_kinds)
    each = gradients(loss)
    assert once[0].item() == pytest.approx(each[0].item(), abs=1e-6)
    torch.testing.assert_close(once[1], each[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(once[2], each[2], rtol=1e-5, atol=1e-6)


def test_pack_counts_four_kinds_of_rows():
    batch = plan.pack([InputFeature(prompt_ids=p, completion_ids=c) for p, c in ROWS])
    assert batch.distinct.tolist() == [0, 2, 4]
    assert batch.kind.tolist() == [0, 0, 1, 0, 2, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_small_head_has_the_numbers_and_gradients_of_the_reference(temperature):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, generator=draw, dtype=torch.float64) for n in (9, 13))
    labels = torch.randint(0, 13, (9,), generator=draw)
    a, b = torch.randn(2, 9, generator=draw, dtype=torch.float64)
    results = []
    for function in (dense_logps_and_entropy, linear_logps_and_entropy):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, entropies = function(h, w, labels, temperature)
        (a * logps + b * entropies).sum().backward()
        results.append([logps.detach(), entropies.detach(), h.grad, w.grad])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
