"""Forward and backward of a whole training step on a GPU: gruppo against TRL with Liger's kernels, in one run.

    PYTHONPATH=src python benchmarks/step.py                      what is importable is compared
    PYTHONPATH=src python benchmarks/step.py --case 4b-lora
    PYTHONPATH=src python benchmarks/step.py --gradients          how far the gradients of both are from float32

Models have the shapes of Qwen3 and random weights; both trainers get the same sequences, advantages and loss. TRL's
part is its own `_compute_loss` with its fused head, on a batch that is padded as its trainer pads it, with Liger's
norm, rope and SwiGLU: its strongest usual setting. Memory is the peak above the weights. FLOP are counted as the step
needs them at least: linear layers 6 (full) or 4 (adapter) per weight and token, a shared prompt once, attention 14 per
visible pair and channel, no recomputation. docs/benchmarks.md has the figures.
"""

import argparse
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import statistics
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec, TransformersModel
from gruppo.types import InputFeature

PEAK = 790e12
"""FLOP/s of a large bf16 product on an H200, measured."""
NOMINAL = 989.5e12
"""FLOP/s of an H200 by its data sheet, by which others count MFU."""
REPEATS = 3

SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
MIDDLE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the sequences of a step."""

    title: str
    sizes: dict[str, Any]
    longest_prompt: int
    longest_completion: int
    groups: int
    size: int = 8
    lora: bool = False
    dtype: torch.dtype = torch.bfloat16
    """Of the weights before training; float32 weights are kept as masters, and under autocast in TRL."""
    tokens: int
    """Of one forward of gruppo."""
    rows: tuple[int, ...]
    """Of one forward of TRL: each is tried, the fastest counts."""
    is_long: bool = False
    """All sequences at their longest; TRL without Liger's kernels and with recomputation, or it does not fit."""


CASES = {
    "0.6b": Case(
        title="0.6B, all weights, bf16",
        sizes=SMALL, longest_prompt=512, longest_completion=1024, groups=8, tokens=24576, rows=(8, 16),
    ),
    "0.6b-float32": Case(
        title="0.6B, all weights, kept in float32",
        sizes=SMALL, longest_prompt=512, longest_completion=1024, groups=8, tokens=24576, rows=(8, 16),
        dtype=torch.float32,
    ),
    "4b-lora": Case(
        title="4B, adapter of rank 16",
        sizes=MIDDLE, longest_prompt=1024, longest_completion=1024, groups=4, lora=True, tokens=12288, rows=(4, 8),
    ),
    "8b-long": Case(
        title="8B, adapter of rank 16, 20k tokens",
        sizes=LARGE, longest_prompt=1024, longest_completion=20000, groups=1, lora=True, tokens=21504, rows=(1,),
        is_long=True,
    ),
}  # fmt: skip


VARIANTS: dict[str, dict[str, Any]] = {
    "not compiled": {"compile": False},
    "keeping 0.5": {"keep_activations": 0.5},
    "12288 tokens a forward": {"tokens_per_microbatch": 12288},
    "recomputing": {"gradient_checkpointing": True},
    "recomputing, offloading": {"gradient_checkpointing": True, "offload": True},
}


def make_model(case: Case) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        is_tied = case.sizes["hidden_size"] < 4096
        config = Qwen3Config(**case.sizes, **COMMON, tie_word_embeddings=is_tied, attn_implementation="sdpa")
        torch.set_default_dtype(case.dtype)
        try:
            return Qwen3ForCausalLM(config).to(case.dtype)
        finally:
            torch.set_default_dtype(torch.float32)


def make_step(case: Case) -> tuple[list[InputFeature], list[float]]:
    """Random sequences and advantages."""
    draw = torch.Generator().manual_seed(0)

    def tokens(shortest: int, longest: int) -> tuple[int, ...]:
        shortest = longest if case.is_long else shortest
        length = int(torch.randint(shortest, longest + 1, (1,), generator=draw))
        return tuple(torch.randint(0, COMMON["vocab_size"], (length,), generator=draw).tolist())

    features = []
    for _ in range(case.groups):
        prompt = tokens(case.longest_prompt // 2, case.longest_prompt)
        for _ in range(case.size):
            completion = tokens(case.longest_completion // 4, case.longest_completion)
            features.append(InputFeature(prompt_ids=prompt, completion_ids=completion))
    return features, torch.randn(len(features), generator=draw).tolist()


def flop(case: Case, features: list[InputFeature]) -> float:
    """What a step needs at least."""
    sizes = case.sizes | COMMON
    hidden, width = sizes["hidden_size"], sizes["head_dim"] * sizes["num_attention_heads"]
    kv_width = sizes["head_dim"] * sizes["num_key_value_heads"]
    per_token = sizes["num_hidden_layers"] * hidden * (2 * width + 2 * kv_width + 3 * sizes["intermediate_size"])
    prompts = {f.prompt_ids for f in features}
    computed = sum(map(len, prompts)) + sum(len(f.completion_ids) for f in features)
    scored = sum(len(f.completion_ids) for f in features)
    pairs = sum(len(p) ** 2 / 2 for p in prompts)
    pairs += sum(len(f.completion_ids) * (len(f.prompt_ids) + len(f.completion_ids) / 2) for f in features)
    factor = 4 if case.lora else 6
    head = factor * hidden * sizes["vocab_size"] * scored
    return factor * per_token * computed + head + 14 * pairs * sizes["num_hidden_layers"] * width


# --- the two ----------------------------------------------------------------------------------------------------------


class Ours:
    """gruppo: `forward_backward` with the defaults of a GPU."""

    def __init__(self, case: Case, **options: Any) -> None:
        lora = LoraSpec(rank=16, alpha=32.0) if case.lora else None
        options = {"tokens_per_microbatch": case.tokens} | options
        self.model = TransformersModel(make_model(case), lora=lora, **options)
        self.model.set_loss(GRPOLoss())
        self.features, self.advantages = make_step(case)

    def step(self) -> float:
        loss = self.model.forward_backward(self.features, advantages=self.advantages).loss
        self.model.weights.zero_grad()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        self.model.forward_backward(self.features, advantages=self.advantages)
        return {name: p.grad.float() for name, p in self.model.weights.named().items() if p.grad is not None}


class TRL:
    """TRL's own loss and model, without its data loader and logging."""

    def __init__(self, case: Case, rows: int, *, autocasts: bool = True) -> None:
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        model: Any = make_model(case)
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        if case.lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
        if case.is_long:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        self.model = model.train()
        trainer: Any = object.__new__(GRPOTrainer)
        trainer.epsilon_low = trainer.epsilon_high = 0.2
        trainer.beta, trainer.loss_type, trainer.importance_sampling_level = 0.0, "grpo", "token"
        trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
        trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
        trainer.args = types.SimpleNamespace(delta=None, report_to=[], fsdp_config=None)
        trainer.state, trainer.model = types.SimpleNamespace(global_step=0), self.model
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        same = staticmethod(lambda value, *_args, **_keywords: value)
        is_float32 = case.dtype == torch.float32 and autocasts
        context = (lambda _self: torch.autocast("cuda", torch.bfloat16)) if is_float32 else None
        members = {"num_processes": 1, "sync_gradients": True, "is_main_process": True}
        members |= dict.fromkeys(("reduce", "gather", "gather_for_metrics"), same)
        members["autocast"] = context or (lambda _self: torch.autocast("cuda", enabled=False))
        trainer.accelerator = type("Accelerator", (), members)()
        self.trainer = trainer
        self.batches = self._batches(*make_step(case), rows)

    def _batches(self, features: list[InputFeature], advantages: list[float], rows: int) -> list[dict[str, Any]]:
        """The step padded as a whole, prompts on the left and completions on the right, then cut into rows."""
        longest = [max(len(f.prompt_ids) for f in features), max(len(f.completion_ids) for f in features)]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        tensors = [torch.zeros(len(features), longest[i // 2], dtype=torch.int64) for i in range(4)]
        for i, feature in enumerate(features):
            prompt, completion = torch.tensor(feature.prompt_ids), torch.tensor(feature.completion_ids)
            tensors[0][i, longest[0] - len(prompt) :], tensors[1][i, longest[0] - len(prompt) :] = prompt, 1
            tensors[2][i, : len(completion)], tensors[3][i, : len(completion)] = completion, 1
        whole = dict(zip(names, tensors, strict=True)) | {"advantages": torch.tensor(advantages)}
        self.trainer.current_gradient_accumulation_steps = len(features) // rows
        starts = range(0, len(features), rows)
        return [{name: x[i : i + rows].cuda() for name, x in whole.items()} for i in starts]

    def gradients(self) -> dict[str, torch.Tensor]:
        for batch in self.batches:
            self.trainer._compute_loss(self.model, batch).backward()
        return {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self) -> float:
        total = 0.0
        for batch in self.batches:
            loss = self.trainer._compute_loss(self.model, batch)
            loss.backward()
            total = total + loss.detach()
        self.model.zero_grad(set_to_none=True)
        self.trainer._metrics["train"].clear()
        return float(total)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in the place of packages that TRL imports and a step does not need."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        class Empty(types.ModuleType):
            __version__ = "9.9"
            __path__: list[str] = []  # noqa: RUF012

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load_peer() -> bool:
    """Import TRL; False if it or Liger is not installed."""
    missing = [name for name in ("datasets", "pandas", "jmespath", "vllm") if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Absent(missing))
    try:
        import liger_kernel.transformers  # noqa: F401
        import trl.trainer.grpo_trainer  # noqa: F401
    except ImportError as error:
        print(f"TRL is left out: {error}")
        return False
    return True


def use_liger() -> None:
    """Liger's kernels in every Qwen3 model that is made from now on."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )


def measure(make: Callable[[], Any], repeats: int = REPEATS) -> dict[str, float]:
    """Milliseconds of the median step, GiB above the weights, seconds of the first step, and the loss."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        contender = make()
        base, start = torch.cuda.memory_allocated(), time.perf_counter()
        contender.step()
        first = time.perf_counter() - start
        if repeats > 1:
            contender.step()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = contender.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
        return {"ms": statistics.median(times) * 1e3, "gib": peak, "first_s": first, "loss": loss}
    except torch.cuda.OutOfMemoryError:
        return {"ms": float("inf"), "gib": float("inf"), "first_s": 0.0, "loss": float("nan")}


def compare_gradients() -> None:
    """Relative distance of the gradients in bf16 from those of TRL in float32, on a model of four layers."""
    sizes = SMALL | {"num_hidden_layers": 4}
    case = replace(CASES["0.6b"], sizes=sizes, groups=2, size=4, tokens=8192, rows=(8,))
    exact = TRL(replace(case, dtype=torch.float32), 8, autocasts=False).gradients()
    whole = torch.cat([g.flatten() for g in exact.values()]).norm()
    for label, make in {"gruppo": lambda: Ours(case), "TRL, Liger": lambda: TRL(case, 8)}.items():
        if label != "gruppo":
            use_liger()
        found = make().gradients()
        apart = torch.cat([(found[name] - gradient).flatten() for name, gradient in exact.items()]).norm()
        print(f"  {label:24} gradient off by {apart / whole:.2e} of its norm ({len(exact)} tensors)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (default: all)")
    parser.add_argument("--variants", action="store_true", help="also not compiled, and recomputing")
    parser.add_argument("--out", help="write the figures to this JSON file")
    parser.add_argument("--gradients", action="store_true", help="compare gradients with float32 and end")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/step.py measures on a GPU, and there is none")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if given.gradients:
        if load_peer():
            compare_gradients()
        return
    results: dict[str, Any] = {}
    for name in given.case or CASES:
        case = CASES[name]
        features, _ = make_step(case)
        least = flop(case, features)
        print(f"\n{case.title}: {len(features)} sequences, {least / 1e12:.0f} TFLOP", flush=True)
        variants: dict[str, dict[str, Any]] = {"gruppo": {"gradient_checkpointing": True} if case.is_long else {}}
        if given.variants:
            variants |= VARIANTS
        results[name] = {"tflop": least / 1e12}
        for label, options in variants.items():
            results[name][label] = measure(partial(Ours, case, **options), 1 if case.is_long else REPEATS)
            print_row(label, results[name][label], least)
    if load_peer():
        for name in sorted(given.case or CASES, key=lambda name: not CASES[name].is_long):  # before Liger is put in
            case, tried = CASES[name], {}
            print(f"\n{case.title}", flush=True)
            if not case.is_long:
                use_liger()
            for num in case.rows:
                label = f"TRL, {'recomputing' if case.is_long else 'Liger'}, {num} rows"
                tried[label] = measure(partial(TRL, case, num), 1 if case.is_long else REPEATS)
                print_row(*list(tried.items())[-1], results[name]["tflop"] * 1e12)
            best = min(row["ms"] for row in tried.values())
            ours = min((row for row in results[name].values() if isinstance(row, dict)), key=lambda row: row["ms"])
            print(f"  gruppo is {best / ours['ms']:.2f} times as fast", flush=True)
            results[name] |= tried
    if given.out:
        os.makedirs(os.path.dirname(given.out) or ".", exist_ok=True)
        with open(given.out, "w") as file:
            json.dump(results, file, indent=1)


def print_row(label: str, row: dict[str, float], least: float) -> None:
    speed = least / row["ms"] * 1e3
    print(
        f"  {label:24} {row['ms']:8.1f} ms  {speed / PEAK:4.0%} of 790, MFU {speed / NOMINAL:4.0%}  "
        f"+{row['gib']:6.2f} GiB  first {row['first_s']:5.1f} s  loss {row['loss']:+.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
