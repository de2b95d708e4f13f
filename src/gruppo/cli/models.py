"""`gruppo eval`, `gruppo sample` and `gruppo export`: a trained model is scored, tried and handed over."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from gruppo.cli.options import parse
from gruppo.errors import InputError


@dataclass
class EvalArguments:
    """Score a model on held-out prompts: greedy accuracy with a 95 % interval and, with --num-samples, unbiased pass@k.

    gruppo eval --model runs/demo/model --num-samples 8 --max-new-tokens 4
    """

    model: str = "builtin"
    """Folder (a full model or an adapter), hub id, or 'builtin'."""
    data: str = "builtin:carries?split=heldout"
    """Prompts, as for `gruppo train`."""
    rewards: tuple[str, ...] | None = None
    """Reward functions, as for `gruppo train`."""
    limit: int | None = None
    """Use only the first N prompts."""
    num_samples: int = 0
    """Sampled completions per prompt, for pass@k. 0: the greedy completion only."""
    temperature: float = 1.0
    """Temperature of sampling."""
    max_new_tokens: int = 256
    """Token limit of a completion."""
    correct_by: str | None = None
    """Name of the reward that decides which answers are correct. Unset: the first verifier, else the first reward."""
    correct_at: float = 1.0
    """Lowest value of that reward that counts as correct."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    system: str | None = None
    """System message put before every chat prompt."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further variables of the model's chat template, as in training."""
    seed: int = 0
    """Seed of sampling."""
    json: bool = False
    """Print one JSON object instead of a table."""


def evaluate_model(arguments: Sequence[str]) -> int:
    given = parse(EvalArguments, arguments, "eval")
    from gruppo.reward import RewardScorer
    from gruppo.sampler import SamplingParams, TorchSampler
    from gruppo.task import load_prompts, resolve_source
    from gruppo.task.sources import default_reward
    from gruppo.trainer.evaluate import evaluate

    rewards = given.rewards or [default_reward(given.data)]
    with RewardScorer(rewards, correct_by=given.correct_by, correct_at=given.correct_at) as scorer:
        rows = resolve_source(given.data, prompt_column=given.prompt_column)
        sampler = TorchSampler(given.model, temperature=given.temperature)
        assert sampler.tokenizer is not None  # loaded by id, so it has one
        prompts = load_prompts(
            rows,
            sampler.tokenizer,
            limit=given.limit,
            system=given.system,
            chat_template_kwargs=given.chat_template_kwargs,
        ).prompts
        params = SamplingParams(temperature=given.temperature, max_new_tokens=given.max_new_tokens, seed=given.seed)
        result = evaluate(prompts, sampler, scorer, params, num_samples=given.num_samples)
    if given.json:
        print(json.dumps({"prompts": len(prompts), **result.metrics}))
        return 0
    print(f"{len(prompts)} prompts of {given.data}")
    for name, value in result.metrics.items():
        if not name.endswith(("_low", "_high")):
            low, high = result.metrics.get(f"{name}_low"), result.metrics.get(f"{name}_high")
            interval = "" if low is None or high is None else f"   95 % interval {low:.4f} to {high:.4f}"
            print(f"{name:<16}{value:.4f}{interval}")
    return 0


@dataclass
class SampleArguments:
    """Draw completions.

    gruppo sample "47+85=" "12+34=" --num-samples 4
    """

    prompts: tyro.conf.Positional[tuple[str, ...]]
    """One or more prompts."""
    model: str = "builtin"
    """Folder (a full model or an adapter), hub id, or 'builtin'."""
    num_samples: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Temperature of sampling. 0 is greedy."""
    max_new_tokens: int = 64
    """Token limit of a completion."""
    top_k: int = 0
    """Sample among the k most likely tokens. 0: all of them."""
    top_p: float = 1.0
    """Sample among the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the most likely token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    chat: bool = False
    """Put the prompt through the model's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further variables of that template, as in training."""
    seed: int = 0
    """Seed of sampling."""


def sample(arguments: Sequence[str]) -> int:
    given = parse(SampleArguments, arguments, "sample")
    if not given.prompts:
        raise InputError('sample needs at least one prompt, e.g. gruppo sample "47+85="')
    from rich.console import Console
    from rich.text import Text

    from gruppo.run.console import visible
    from gruppo.sampler import SamplingParams, TorchSampler
    from gruppo.task import load_prompts

    params = SamplingParams(
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        stop=given.stop,
        seed=given.seed,
    )
    sampler = TorchSampler(given.model)
    assert sampler.tokenizer is not None  # loaded by id, so it has one
    rows = [{"prompt": [{"role": "user", "content": p}] if given.chat else p} for p in given.prompts]
    prompts = load_prompts(rows, sampler.tokenizer, chat_template_kwargs=given.chat_template_kwargs).prompts
    console = Console(highlight=False)
    for prompt, response in zip(prompts, sampler.sample(prompts, given.num_samples, params), strict=True):
        for sequence in response.sequences:
            total = sum(sequence.logps or ())
            line = Text.assemble(visible(prompt.text), " -> ", (visible(sequence.text, 10_000).plain, "bold"))
            console.print(line, f"  log-prob {total:.2f}, {len(sequence.tokens)} tokens, {sequence.stop_reason}")
    return 0


@dataclass
class ExportArguments:
    """Copy a run's model into a folder of its own, for transformers, PEFT and vLLM.

    gruppo export runs/demo my-model
    gruppo export runs/lora my-merged-model --merge
    """

    source: tyro.conf.Positional[Path]
    """A run directory, or a model folder."""
    output: tyro.conf.Positional[Path]
    """New folder to write."""
    merge: bool = False
    """Fold a LoRA adapter into the weights of its base."""


def export(arguments: Sequence[str]) -> int:
    given = parse(ExportArguments, arguments, "export")
    folder = given.source / "model" if (given.source / "model").is_dir() else given.source
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise InputError(f"{given.source} holds no model: no model/, config.json or adapter_config.json in it")
    if given.merge and not is_adapter:
        raise InputError(f"{folder} holds no adapter to merge; leave out --merge")
    from gruppo.model import TransformersModel

    if given.merge:
        import torch

        from gruppo.model.checkpoint import save_pretrained
        from gruppo.model.lora import merge
        from gruppo.weights.source import load_dequantized, load_tokenizer

        adapted: Any = load_dequantized(str(folder), dtype=torch.float32)
        save_pretrained(merge(adapted), load_tokenizer(str(folder)), given.output)
    else:
        TransformersModel(str(folder), device="cpu").save(given.output)
    print(f"{given.output} holds the {'merged model' if given.merge else 'adapter' if is_adapter else 'model'}")
    return 0
