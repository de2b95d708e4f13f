"""`gruppo eval`: held-out accuracy and pass@k of any model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppo.cli.options import parse


@dataclass
class EvalArguments:
    model: str = "builtin"
    """Folder (a full model or an adapter), hub id, or 'builtin'."""
    data: str = "builtin:carries?split=heldout"
    """Prompts, as for `gruppo train`."""
    rewards: tuple[str, ...] = ("exact_match",)
    """Reward functions: built-in names or module:function."""
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
    given = parse(
        EvalArguments,
        arguments,
        verb="eval",
        description="Score a model on held-out prompts: greedy accuracy with a 95 % interval and, with --num-samples, "
        "unbiased pass@k.\n\n  gruppo eval --model runs/demo/model --num-samples 8 --max-new-tokens 4",
    )
    from gruppo.reward import RewardScorer
    from gruppo.sampler import SamplingParams, TorchSampler
    from gruppo.task import load_prompts, resolve_source
    from gruppo.trainer.evaluate import evaluate

    with RewardScorer(given.rewards, correct_by=given.correct_by, correct_at=given.correct_at) as scorer:
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
