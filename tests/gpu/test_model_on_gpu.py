"""Training and sampling of a small model on a GPU: every combination of options against float32, and decoding.

CI has no GPU; there these tests are skipped. On a machine with one: `pytest tests/gpu`, or without pytest
`PYTHONPATH=src python tests/gpu/test_model_on_gpu.py`, which runs every test and prints its name.
"""

import itertools
import random
import sys

import torch

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
except ImportError:  # run as a script on a machine without pytest
    pytest = None

from transformers import Qwen3Config, Qwen3ForCausalLM

from gruppo.batch import pack
from gruppo.kernel.triton_decode import draw_tokens
from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import InputFeature, Prompt, Rollout


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=64, vocab_size=1000, initializer_range=0.1)
    return Qwen3ForCausalLM(config).to(dtype)


def sequences(seed=0, groups=4, size=4):
    rng = random.Random(seed)
    tokens = lambda low, high: tuple(rng.randrange(1000) for _ in range(rng.randint(low, high)))  # noqa: E731
    prompts = [tokens(20, 150) for _ in range(groups)]
    features = [InputFeature(prompt_ids=p, completion_ids=tokens(5, 200)) for p in prompts for _ in range(size)]
    return features, [rng.gauss(0, 1) for _ in features]


def loss_and_gradient(features, advantages, **options):
    model = TransformersModel(small_model(), **options)
    if options.get("lora"):
        draw = torch.Generator().manual_seed(1)
        for name, master in model.weights.named().items():
            if "lora_B" in name:  # B starts at 0, which would hide half of the adapter
                master.data.copy_(0.05 * torch.randn(master.shape, generator=draw))
        model.weights.write_back()
    model.set_loss(GRPOLoss())
    loss = model.forward_backward(features, advantages=advantages).loss
    return loss.item(), torch.cat([p.grad.flatten().float() for p in model.weights.parameters])


def test_every_combination_of_options_gives_the_loss_and_gradient_of_float32():
    features, advantages = sequences()
    for lora in (None, LoraSpec(rank=4)):
        exact, gradient = loss_and_gradient(
            features, advantages, dtype="float32", layout="padded", compile=False, lora=lora
        )
        plain = None
        for layout, compiled, recomputed in itertools.product(("padded", "shared"), (False, True), (False, True)):
            options = {"layout": layout, "compile": compiled, "gradient_checkpointing": recomputed, "lora": lora}
            loss, found = loss_and_gradient(features, advantages, dtype="auto", **options)
            error = float((found - gradient).norm() / gradient.norm())
            plain = error if plain is None else plain
            assert abs(loss - exact) < 5e-3, (options, loss, exact)
            assert error < max(1.5 * plain, 0.02), (options, error, plain)
            print(f"  {layout:7} compile={compiled!s:5} recompute={recomputed!s:5} {error:.2e}", flush=True)


def test_what_is_kept_for_the_backward_and_where_changes_no_gradient():
    torch._dynamo.reset()
    features, advantages = sequences()
    _, gradient = loss_and_gradient(features, advantages, dtype="float32", layout="padded", compile=False)
    for options in (
        {"keep_activations": 1.0},
        {"keep_activations": 0.4},
        {"gradient_checkpointing": True, "offload": True},
        {"gradient_checkpointing": True, "offload": True, "compile": False},
    ):
        for layout in ("padded", "shared"):
            _, found = loss_and_gradient(features, advantages, layout=layout, **options)
            error = float((found - gradient).norm() / gradient.norm())
            print(f"  {layout:7} {options} {error:.2e}", flush=True)
            assert error < 0.03, (layout, options, error)


def test_rows_that_replace_others_draw_what_they_draw_beside_as_many():
    model = TransformersModel(small_model(), compile=False)
    prompts = [f.prompt_ids for f in sequences()[0][::4]]
    owner = [i % len(prompts) for i in range(32)]
    uniforms = torch.rand(32, 120, generator=torch.Generator().manual_seed(5))
    options = {"places": 8, "temperature": 1.0, "stop_ids": tuple(range(20)), "poll": lambda: None}
    with torch.inference_mode():
        found = model.decode(prompts, owner, uniforms, **options)
        parts = [model.decode(prompts, owner[i : i + 8], uniforms[i : i + 8], **options) for i in range(0, 32, 8)]
    assert len(set(found.length.tolist())) > 5
    for row in range(32):
        alone, num = parts[row // 8], int(found.length[row])
        assert int(alone.length[row % 8]) == num
        assert torch.equal(alone.tokens[row % 8, :num], found.tokens[row, :num])
        assert torch.equal(alone.logps[row % 8, :num], found.logps[row, :num])


def test_the_plan_of_the_memory_is_right_to_ten_percent():
    from gruppo.trainer.estimate import bytes_per_token

    for recomputed in (False, True):
        model = TransformersModel(small_model(), layout="padded", gradient_checkpointing=recomputed)
        model.set_loss(GRPOLoss())
        per_token = bytes_per_token(model, shares=False)
        peaks = []
        for num in (4096, 12288):
            features = [InputFeature(prompt_ids=(1,), completion_ids=tuple(range(num // 16))) for _ in range(16)]
            features = [
                InputFeature(prompt_ids=(i, 1), completion_ids=f.completion_ids) for i, f in enumerate(features)
            ]
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                model.logp_model.body(pack(features).to(model.device)).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated())
        measured = (peaks[1] - peaks[0]) / 8192
        print(f"  recompute={recomputed}: planned {per_token:.0f}, measured {measured:.0f} bytes per token", flush=True)
        assert abs(per_token / measured - 1) < 0.1


def test_random_lengths_compile_at_most_three_graphs():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = TransformersModel(small_model(), layout="shared")
    model.set_loss(GRPOLoss())
    counters.clear()
    for seed in range(50):
        features, advantages = sequences(seed, groups=2 + seed % 4)
        model.forward_backward(features, advantages=advantages)
    assert counters["stats"]["unique_graphs"] <= 3


def test_decoding_in_graphs_has_the_log_probs_of_the_trainer():
    features, advantages = sequences()
    prompts = [Prompt(token_ids=f.prompt_ids, index=i) for i, f in enumerate(features[::4])]
    params = SamplingParams(max_new_tokens=60, seed=3, step=1, temperature=0.8)
    for options in ({"lora": LoraSpec(rank=4)}, {"compile": False}, {}):
        model = TransformersModel(small_model(), **options)
        model.set_loss(GRPOLoss())
        model.set_optimizer(lr=0.01)
        sampler = TorchSampler(model)
        sampler.stop_ids = (7,)
        model.logp_model.temperature = 0.8
        before = None
        for _ in range(3):  # the graph is made, its prompts' too, and both serve weights that have moved
            drawn = [t for samples in sampler.draw(prompts, 8, params) for t in samples]
            assert [t.tokens for s in sampler.draw(prompts, 8, params) for t in s] == [t.tokens for t in drawn]
            assert all((t.stop_reason == "stop") == (t.tokens[-1] == 7) and 7 not in t.tokens[:-1] for t in drawn)
            scored = model.forward_only([Rollout(trajectory=t) for t in drawn])
            for name in ("logps", "entropies"):
                theirs = torch.cat([x.cpu() for x in scored[name]])
                ours = torch.tensor([x for t in drawn for x in getattr(t, name)])
                assert float((ours - theirs).abs().mean()) < 0.02, (options, name)
            assert [t.tokens for t in drawn] != before
            before, decoder = [t.tokens for t in drawn], model.logp_model.decoder
            model.forward_backward(features, advantages=advantages)
            model.clip_grad_and_step(1e9)
        assert decoder is not None and decoder.num_runs == 6


def test_drawn_tokens_have_the_frequencies_of_the_distribution():
    draw = torch.Generator(device="cuda").manual_seed(0)
    logits = 2 * torch.randn(1, 3000, device="cuda", generator=draw)
    logits[0, 2000:] = -torch.inf
    num = 400_000
    u = torch.rand(num, device="cuda", generator=draw)
    counts = torch.zeros(3000, device="cuda")
    for part in u.split(20_000):
        token, _, _ = draw_tokens(logits.expand(len(part), -1).contiguous(), part, 1.3)
        counts += torch.bincount(token, minlength=3000)
    expected = num * (logits[0] / 1.3).softmax(0)
    seen = expected >= 20
    chi2 = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    degrees = int(seen.sum())
    assert not counts[2000:].any()
    assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5, (chi2, degrees)


if __name__ == "__main__":
    for test_name, test in list(globals().items()):
        if test_name.startswith("test_") and test_name in (sys.argv[1:] or [test_name]):
            test()
            print("passed", test_name, flush=True)
