"""Estimate of a run: what it will do, in numbers, before it does it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gruppo.batch import pack, pack_shared
from gruppo.batch.packed import usual_width
from gruppo.kernel.head import memory_estimate
from gruppo.model.attention_hook import refusal
from gruppo.model.logp_model import SMALL_LOGITS
from gruppo.model.plan import WORTH_IT, plan_rows
from gruppo.model.precision import half_or_float
from gruppo.parallel.ranks import Ranks
from gruppo.trainer.config import TrainConfig
from gruppo.types import InputFeature, Prompt
from gruppo.weights.source import holds_adapter, outline

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor

MiB = 2**20
ADAPTER_SHARE = 100
"""Weights of a model for each one of an adapter, about."""
COMFORT = 3
"""A rank has room for all weights when its memory is this many times what they take: activations need the rest."""
TRIAL_TOKENS = (1024, 3072)
"""Tokens of the two trial forwards from which a GPU's memory per token is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """Everything that follows from the three batch numbers, the data and the model."""

    sequences_per_step: int
    tokens_per_step: int
    """At most: prompts as they are, completions at their limit."""
    microbatches: int
    optimizer_steps: int
    epochs: float
    """How often the run sees each prompt."""
    parameters: int
    trainable: int
    memory: int
    """Bytes of training, on each rank: weights, gradients, optimizer, reference, one micro-batch's activations. On one
    GPU activations are measured on a few tokens; elsewhere a rough estimate."""
    prompt_copies: int
    """How often the prompt of a group is computed in a step: its completions, or less when they share it."""
    computed_tokens: int
    """Tokens that the body of the model computes in a step, at most."""
    reading: tuple[str, ...] = ()
    """How the rows of the data became prompts, one sentence each."""
    held_out: int = 0
    """Prompts that are evaluated on and not trained on."""
    verdict: str = ""
    """Which answers are right, in a sentence."""
    ranks: int = 1
    copy: int = 0
    """Bytes that the first rank holds beside: the copy from which `sampler torch` samples."""

    def lines(self, config: TrainConfig) -> list[str]:
        share = f"{self.trainable:,} of {self.parameters:,} parameters train"
        shared = (
            f"layout {config.layout}: prompt tokens computed {self.prompt_copies}x instead of {config.group_size}x, "
            f"up to {self.tokens_per_step / self.computed_tokens:.1f}x fewer tokens"
        )
        does = {"builtin": "adds two numbers", "builtin-chat": "can call a calculator"}.get(config.model)
        toy = f" (the embedded toy, which {does}; model=... names another)" if does else ""
        where = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        copy = f", and {self.copy / MiB:,.0f} MiB more on the first, from which sampler torch samples"
        refill = f"dynamic sampling: up to {config.dynamic_sampling} batch(es) of prompts per step, including the first"
        return [
            *([f"data: {'; '.join(self.reading)}"] if self.reading else []),
            f"{config.prompts_per_step} prompts x {config.group_size} completions = {self.sequences_per_step} "
            f"sequences per step, at most {self.tokens_per_step:,} tokens, in {self.microbatches} micro-batch(es)",
            f"{config.steps} steps x {config.epochs_per_batch} epoch(s) x {config.minibatches} minibatch(es) = "
            f"{self.optimizer_steps} optimizer steps; each prompt is seen {self.epochs:.2g} time(s)"
            + (f", and {self.held_out} are held out" if self.held_out else ""),
            *([shared] if self.prompt_copies < config.group_size else []),
            *([refill] if config.dynamic_sampling else []),
            f"{share}; about {self.memory / MiB:,.0f} MiB of memory{where} (estimate){copy if self.copy else ''}",
            f"model {config.model}{toy}, data {config.data}, rewards {', '.join(config.rewards or ())}"
            + (f"; {self.verdict}" if self.verdict else ""),
        ]


def estimate_run(
    config: TrainConfig,
    model: "Actor",
    prompts: Sequence[Prompt],
) -> RunEstimate:
    """The estimate of a run that trains a model on these prompts."""
    mean_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
    hidden_size = _shape(model.model)[0]
    sequences = config.prompts_per_step * config.group_size
    tokens = int(sequences * (mean_prompt_tokens + config.max_new_tokens))
    copies = _prompt_copies(config, mean_prompt_tokens, hidden_size, model.device.type == "cuda")
    computed = tokens - int(config.prompts_per_step * (config.group_size - copies) * mean_prompt_tokens)
    micro = computed if config.tokens_per_microbatch is None else min(computed, config.tokens_per_microbatch)
    ranks, activations = model.ranks.world, None
    if model.device.type == "cuda" and ranks == 1:  # measuring would be a step of all ranks
        shares = copies < config.group_size and refusal(model.logp_model.base) is None
        activations = int(micro * bytes_per_token(model, shares=shares))
    memory = training_memory(
        config, model.model, tokens=micro, dtype=model.dtype, ranks=model.num_shards, activations=activations
    )
    parameters, trainable = _sizes(model.model.parameters())
    return RunEstimate(
        sequences_per_step=sequences,
        tokens_per_step=tokens,
        microbatches=-(-computed // micro),
        optimizer_steps=config.optimizer_steps,
        epochs=config.steps * config.prompts_per_step / len(prompts),
        parameters=parameters,
        trainable=trainable,
        memory=memory.total + _kept_cache(config, model, prompts),
        prompt_copies=copies,
        computed_tokens=computed,
        ranks=ranks,
        copy=model.copy_bytes,
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def _kept_cache(config: TrainConfig, model: "Actor", prompts: Sequence[Prompt]) -> int:
    """Bytes of the cache that the sampler keeps on a GPU from one step to the next."""
    if model.device.type != "cuda" or config.sampler != "torch" or model.ranks.world > 1:
        return 0
    from gruppo.model.decoder import bytes_to_keep, can_decode

    if not can_decode(model.logp_model):
        return 0
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return bytes_to_keep(
        model.logp_model, config.prompts_per_step * (config.group_size * config.max_new_tokens + usual_width(longest))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that training takes on a GPU, by what they are for."""

    weights: int
    """All of them, with float32 masters of those that train, or this rank's rows."""
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    """Rows of other ranks that a rank gathers to compute with, and gradients on their way back. 0 in one process."""
    activations: int
    """Of one micro-batch, its logits included."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.gathered + self.activations


def training_memory(
    config: TrainConfig,
    model: nn.Module,
    *,
    tokens: int,
    dtype: torch.dtype,
    ranks: int = 1,
    activations: int | None = None,
) -> Memory:
    """Bytes of a training step, before it is made. The model may be on the meta device: only its shapes are read.

    Args:
        tokens: of one micro-batch.
        dtype: in which the model computes.
        ranks: processes that share the weights by `fully_shard`.
        activations: bytes of the activations without logits; None: a rough estimate.
    """
    parameters, trained = _sizes(model.parameters())
    hidden_size, num_layers, vocabulary = _shape(model)
    compute = dtype.itemsize
    if activations is None:
        # A layer keeps about 16 vectors of the hidden size per token for its backward. With recomputation it keeps its
        # input, and one layer at a time has all of them.
        vectors = num_layers + 16 if config.gradient_checkpointing else num_layers * 16
        activations = tokens * hidden_size * vectors * compute
    walk = memory_estimate(tokens, hidden_size, vocabulary, trained=not config.lora, bytes_per_weight=compute)
    logits = tokens * vocabulary * 4 * 3 if tokens * vocabulary <= SMALL_LOGITS else sum(walk.values())
    activations += logits
    if ranks == 1:
        halves = trained * compute if compute < 4 else 0  # their gradients, when activations are gone
        return replace(whole_state(config, parameters, trained, compute), activations=max(activations, halves))
    from gruppo.model.compiled_blocks import find_blocks  # brings the compiler

    blocks = [_sizes(block.parameters()) for block in find_blocks(model)]
    block, block_trained = max(blocks, default=(0, 0))
    outside, outside_trained = parameters - sum(n for n, _ in blocks), trained - sum(n for _, n in blocks)
    # In the backward of a block: its weights and those of the next, its gradient, and that in float32 to be reduced.
    # What is outside of the blocks is gathered from the first forward to the last backward.
    gathered = 2 * block * compute + block_trained * (compute + 4) + (outside + outside_trained) * compute
    frozen = _frozen(config, parameters)
    return Memory(
        weights=-(-parameters * 4 // ranks),
        gradients=-(-trained * 4 * (2 if config.advanced.ranks_exact else 1) // ranks),  # exact: and the sums so far
        optimizer=-(-trained * 8 // ranks),
        reference=-(-frozen * 4 // ranks),
        gathered=gathered,
        activations=activations,
    )


def whole_state(config: TrainConfig, parameters: int, trained: int, compute: int) -> Memory:
    """What a process holds besides activations that keeps all weights, of `compute` bytes each."""
    return Memory(
        weights=parameters * compute + (trained * 4 if compute < 4 else 0),
        gradients=trained * 4,
        optimizer=trained * 8,
        reference=_frozen(config, parameters) * compute,
        gathered=0,
        activations=0,
    )


def _frozen(config: TrainConfig, parameters: int) -> int:
    """Parameters of the reference; an adapter's is the base, which is there."""
    return parameters if (config.beta or config.kl_in_reward) and not config.lora else 0


def _sizes(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Numbers in these parameters, and in those of them that train."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def _shape(model: nn.Module) -> tuple[int, int, int]:
    """Hidden size, layers and vocabulary by the config; 0 where it does not have them."""
    config = getattr(model, "config", None)
    shape = config.get_text_config() if hasattr(config, "get_text_config") else None  # type: ignore[union-attr]
    hidden_size, num_layers, vocabulary = (
        getattr(shape, name, 0) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    return hidden_size, num_layers, vocabulary


def replicates(config: TrainConfig, model_id: Any, ranks: Ranks) -> bool:
    """Whether every rank keeps all weights, by `shard`; auto is one decision of all ranks."""
    if config.shard != "auto":
        return config.shard == "none"
    parameters = sum(parameter.numel() for parameter in outline(model_id).parameters())
    is_adapter = config.lora or holds_adapter(model_id)
    trainable = parameters // ADAPTER_SHARE if is_adapter else parameters
    if torch.cuda.is_available():
        room = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world)
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // on_machine
    needed = whole_state(config, parameters, trainable, half_or_float(config.dtype).itemsize)
    return not ranks.highest(int(needed.total > room / COMFORT))


def bytes_per_token(model: "Actor", *, shares: bool) -> float:
    """Bytes of a GPU that a token more takes in the forward and backward of the model's body.

    Measured on two small forwards, which also compile what the run will use. Gradients are dropped as they come.
    """
    peaks = []
    trained = [p for p in model.model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
    try:
        for num in TRIAL_TOKENS:
            prompt = (0,) * (num // 8)  # short: a token that is scored takes more
            half = (num - len(prompt)) // 2
            features = [InputFeature(prompt_ids=prompt, completion_ids=(i,) * half) for i in range(2)]
            if not shares:
                features = [InputFeature(prompt_ids=prompt, completion_ids=(0,) * (num - len(prompt)))]
            batch = (pack_shared(features, multiple_of=128) if shares else pack(features)).to(model.device)
            for _ in range(2):  # the first may compile
                torch.cuda.reset_peak_memory_stats(model.device)
                model.logp_model.body(batch).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return (peaks[1] - peaks[0]) / (TRIAL_TOKENS[1] - TRIAL_TOKENS[0])


def _prompt_copies(config: TrainConfig, mean_prompt_tokens: float, hidden_size: int, is_cuda: bool) -> int:
    """As `model/plan.py` would decide for a step of mean prompts and longest completions."""
    group, prompt, own = config.group_size, max(round(mean_prompt_tokens), 1), config.max_new_tokens - 1
    if config.layout not in ("auto", "shared"):
        return group
    every = config.prompts_per_step
    rows = plan_rows([prompt] * every, [[own] * group] * every, hidden_size=hidden_size or 1024, is_cuda=is_cuda)
    if config.layout == "auto" and rows.saving < WORTH_IT:
        return group
    # A group that exceeds a micro-batch, or a row, is split; each part computes the prompt.
    rooms = [limit - prompt for limit in (config.tokens_per_microbatch, rows.row_slots) if limit is not None]
    return min(max([1, *(-(-group // max(room // max(own, 1), 1)) for room in rooms)]), group)
