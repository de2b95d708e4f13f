"""Sampling on a GPU: gruppo's torch sampler against transformers' generate, in one run.

    PYTHONPATH=src python benchmarks/sample.py

A model of the shape of Qwen3-0.6B with random weights in bf16, 16 prompts of up to 256 tokens, 8 samples of 256 tokens
each, no end token. Also: how far the sampler's log-probs are from the trainer's, and whether a second call draws the
same tokens. docs/benchmarks.md has the figures.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from step import CASES, make_model

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import Prompt, Rollout

PROMPTS, SAMPLES, LENGTH, TOKENS = 16, 8, 256, 256


def make_prompts() -> list[Prompt]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH * 3 // 4, LENGTH + 1, (PROMPTS,), generator=draw).tolist()
    rows = [tuple(torch.randint(0, 151936, (n,), generator=draw).tolist()) for n in lengths]
    return [Prompt(token_ids=ids, index=i) for i, ids in enumerate(rows)]


def tokens_per_second(run: Callable[[], Any], calls: int = 3) -> tuple[float, float]:
    """Of the median call after the first, and the seconds of the first."""
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first, times = time.perf_counter() - start, []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return PROMPTS * SAMPLES * TOKENS / statistics.median(times), first


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks/sample.py measures on a GPU, and there is none")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    prompts, params = make_prompts(), SamplingParams(max_new_tokens=TOKENS, seed=1, step=0)
    results: dict[str, Any] = {}
    for name, options in {"gruppo": {}, "gruppo, not compiled": {"compile": False}}.items():
        gc.collect()
        torch.cuda.empty_cache()
        model = TransformersModel(make_model(CASES["0.6b"]), **options)
        sampler = TorchSampler(model)
        sampler.stop_ids = ()
        rate, first = tokens_per_second(lambda sampler=sampler: sampler.draw(prompts, SAMPLES, params))
        drawn = [t for samples in sampler.draw(prompts, SAMPLES, params) for t in samples]
        again = [t for samples in sampler.draw(prompts, SAMPLES, params) for t in samples]
        scored = model.forward_only([Rollout(trajectory=t) for t in drawn])["logps"]
        gap = torch.cat([s.cpu() - torch.tensor(t.logps) for s, t in zip(scored, drawn, strict=True)]).abs()
        same = [t.tokens for t in drawn] == [t.tokens for t in again]
        results[name] = {
            "tok_per_s": rate,
            "first_s": first,
            "gap_mean": gap.mean().item(),
            "gap_max": gap.max().item(),
        }
        print(
            f"{name:24} {rate:8.0f} tok/s  first call {first:5.1f} s  log-probs from the trainer's: mean "
            f"{gap.mean():.4f}, max {gap.max():.3f}  second call {'the same' if same else 'differs'}",
            flush=True,
        )
        del model, sampler
    gc.collect()
    torch.cuda.empty_cache()
    plain = make_model(CASES["0.6b"]).eval()
    ids = torch.tensor([[0] * (LENGTH - len(p.token_ids)) + list(p.token_ids) for p in prompts], device="cuda")
    mask = torch.tensor([[0] * (LENGTH - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts], device="cuda")
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": True, "top_k": 0}
    options |= {"num_return_sequences": SAMPLES, "pad_token_id": 0}
    with torch.inference_mode():
        rate, first = tokens_per_second(lambda: plain.generate(input_ids=ids, attention_mask=mask, **options), calls=1)
    results["transformers"] = {"tok_per_s": rate, "first_s": first}
    print(f"{'transformers, generate':24} {rate:8.0f} tok/s  first call {first:5.1f} s")
    print(f"gruppo is {results['gruppo']['tok_per_s'] / rate:.1f} times as fast")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
