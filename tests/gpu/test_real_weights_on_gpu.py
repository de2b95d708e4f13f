"""SmolLM2 on a GPU: prompts are shared in bfloat16, and no layout is further from float32 than padded rows are.

CI has no GPU; there these tests are skipped. On a machine with one: `pytest tests/gpu`, or without pytest
`PYTHONPATH=src:tests/unit/model python tests/gpu/test_real_weights_on_gpu.py`, which runs every test and prints its
name.
"""

import functools
import logging
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

from gruppo.model import TransformersModel
from gruppo.types import InputFeature
from gruppo.weights.gguf import folder_of
from gruppo.weights.smollm2 import smollm2

HYBRIDS = ("qwen3_next", "falcon_h1", "lfm2", "mamba", "recurrent_gemma")


@functools.cache
def folder():
    return str(folder_of(smollm2(print)))


def heard(action):
    """What the project warns of meanwhile."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gruppo").addHandler(handler)
    try:
        action()
    finally:
        logging.getLogger("gruppo").removeHandler(handler)
    return lines


def texts(tokenizer, groups=16, size=8):
    rng, features = random.Random(2), []
    for _ in range(groups):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        chat = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        prompt = tokenizer(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False), add_special_tokens=False
        )["input_ids"]
        for i in range(size):
            answer = f"{'The answer is: ' * (i % 3)}{a} + {b} = {a + b + i}.<|im_end|>"
            ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            features.append(InputFeature(prompt_ids=tuple(prompt), completion_ids=tuple(ids)))
    return features, [rng.gauss(0, 1) for _ in features]


def logps_and_gradient(**options):
    model = TransformersModel(folder(), **options)
    features, advantages = texts(model.tokenizer)
    logps = torch.cat([x.float().cpu() for x in model.forward_only(features)["logps"]])
    model.forward_backward(features, advantages=advantages)
    return logps, torch.cat([p.grad.flatten().float().cpu() for p in model.weights.parameters])


def test_prompts_are_shared_in_bfloat16():
    model = TransformersModel(folder(), dtype="bfloat16")
    features, _ = texts(model.tokenizer)
    batches = []
    said = heard(lambda: batches.extend(model.planner.split([f.rollout() for f in features])))
    assert [batch.shared is not None for batch in batches] == [True], said
    assert said == []


def test_no_layout_is_further_from_float32_than_padded_rows():
    exact, exact_gradient = logps_and_gradient(dtype="float32", layout="padded", compile=False)
    far = {}
    for layout in ("padded", "packed", "shared"):
        for compiled in (False, True):
            logps, gradient = logps_and_gradient(dtype="bfloat16", layout=layout, compile=compiled)
            gap = (logps - exact).abs()
            off = float((gradient - exact_gradient).norm() / exact_gradient.norm())
            far[layout, compiled] = float(gap.mean()), off
            print(
                f"{layout:7} compiled {compiled!s:5}: log-probs {gap.mean():.4f} on average, {gap.quantile(0.99):.3f} "
                f"at the 99th percentile, {gap.max():.3f} at most; gradient {off:.4f} of its norm",
                flush=True,
            )
    logps, gradient = far["padded", False]
    assert logps > 1e-3  # bfloat16 was on
    for found in far.values():
        assert found[0] < 1.5 * logps and found[1] < 1.5 * gradient


def test_models_whose_packed_rows_leak_stay_refused():
    from tiny_models import tiny_model

    features = [InputFeature(prompt_ids=(5, 9, 4, 17), completion_ids=tuple(range(3, 3 + n))) for n in (8, 9, 5)]
    features += [InputFeature(prompt_ids=(12, 30, 6), completion_ids=tuple(range(5, 5 + n))) for n in (7, 4, 6)]
    for family in HYBRIDS:
        for dtype in ("float32", "bfloat16"):
            for layout in ("packed", "shared"):
                model = TransformersModel(tiny_model(family), dtype=dtype, layout=layout, compile=False)
                batches = []
                said = heard(lambda m=model, b=batches: b.extend(m.planner.split([f.rollout() for f in features])))
                assert not any(batch.in_one_row or batch.shared for batch in batches), (family, dtype, layout)
                assert any("the layout is padded" in line for line in said), (family, dtype, layout, said)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and name in (sys.argv[1:] or [name]):
            test()
            print("passed", name, flush=True)
