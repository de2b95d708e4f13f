"""What a run will do, in numbers, before it does it."""

from dataclasses import dataclass

from gruppo.kernel.sizes import memory_estimate
from gruppo.model.forward import SMALL_LOGITS
from gruppo.trainer.config import TrainConfig

MiB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
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
    """Bytes: weights, gradients, optimizer, reference, one micro-batch's activations. A rough estimate."""

    def lines(self, config: TrainConfig) -> list[str]:
        share = f"{self.trainable:,} of {self.parameters:,} parameters train"
        return [
            f"{config.prompts_per_step} prompts x {config.group_size} completions = {self.sequences_per_step} "
            f"sequences per step, at most {self.tokens_per_step:,} tokens, in {self.microbatches} micro-batch(es)",
            f"{config.steps} steps x {config.epochs_per_batch} epoch(s) x {config.minibatches} minibatch(es) = "
            f"{self.optimizer_steps} optimizer steps; each prompt is seen {self.epochs:.2g} time(s)",
            f"{share}; about {self.memory / MiB:,.0f} MiB of memory (estimate)",
        ]


def make_plan(
    config: TrainConfig,
    *,
    num_prompts: int,
    mean_prompt_tokens: float,
    parameters: int,
    trainable: int,
    hidden_size: int,
    num_layers: int,
    vocabulary: int,
) -> Plan:
    """Derive the plan."""
    sequences = config.prompts_per_step * config.group_size
    tokens = int(sequences * (mean_prompt_tokens + config.max_new_tokens))
    micro = tokens if config.tokens_per_microbatch is None else min(tokens, config.tokens_per_microbatch)
    bytes_per = 4 if config.dtype == "float32" else 2
    # A layer keeps about 16 vectors of the hidden size per token for its backward; with recomputation one.
    kept = 1 if config.gradient_checkpointing else 16
    activations = micro * hidden_size * num_layers * kept * bytes_per
    walk = memory_estimate(micro, hidden_size, vocabulary, trained=not config.lora, bytes_per_weight=bytes_per)
    logits = micro * vocabulary * 4 * 3 if micro * vocabulary <= SMALL_LOGITS else sum(walk.values())
    reference = parameters * bytes_per if config.beta and not config.lora else 0
    memory = parameters * bytes_per + trainable * (4 + 8) + reference + activations + logits
    return Plan(
        sequences_per_step=sequences,
        tokens_per_step=tokens,
        microbatches=-(-tokens // micro),
        optimizer_steps=config.optimizer_steps,
        epochs=config.steps * config.prompts_per_step / num_prompts,
        parameters=parameters,
        trainable=trainable,
        memory=memory,
    )
