"""`gruppo sample`: completions of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from gruppo.cli.options import parse
from gruppo.errors import InputError


@dataclass
class SampleArguments:
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
    given = parse(
        SampleArguments,
        arguments,
        verb="sample",
        description='Draw completions.\n\n  gruppo sample "47+85=" "12+34=" --num-samples 4',
    )
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
