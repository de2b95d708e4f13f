"""LoRA through PEFT.

The adapter starts at zero, so that the policy is the base model before its first step: ratio exactly 1, KL
exactly 0. Dropout would break that and is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gruppo.errors import InputError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapter: W + (alpha / rank) * B @ A on the named layers."""

    rank: int = 8
    alpha: float = 16.0
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers, or "all-linear": every linear layer but the head."""
    seed: int = 0
    """Of the random half of the adapter (A; B starts at zero): the same seed gives the same adapter."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"lora rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise InputError(f"lora alpha must be positive, got {self.alpha}")


def lora_of(model: Any) -> LoraSpec | None:
    """The adapter that a PEFT model carries; None for any other model, and for adapters other than LoRA."""
    configs = getattr(model, "peft_config", None)
    config = next(iter(configs.values()), None) if isinstance(configs, Mapping) else None
    if config is None or not hasattr(config, "lora_alpha"):
        return None
    targets = config.target_modules
    return LoraSpec(
        rank=config.r,
        alpha=config.lora_alpha,
        targets=targets if isinstance(targets, str) else tuple(sorted(targets or ())),
    )


def add_lora(model: "PreTrainedModel", spec: LoraSpec) -> "PeftModel":
    """Freeze the model and put a zero adapter on it."""
    from peft import LoraConfig, get_peft_model

    if not isinstance(spec, LoraSpec):
        raise InputError(
            f"lora must be a LoraSpec(rank=..., alpha=..., targets=...), got {type(spec).__name__}; a model that PEFT "
            "has adapted already is given as the model itself"
        )
    there = lora_of(model)
    if there is not None:
        raise InputError(
            f"the model carries an adapter already (rank {there.rank}, alpha {there.alpha:g}, on "
            f"{there.targets if isinstance(there.targets, str) else ', '.join(there.targets)}), which a new one would "
            "hide. Leave lora out to go on with it, or fold it into its base first: gruppo export FOLDER NEW --merge"
        )

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # PEFT divides; any number will do
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # PEFT draws from torch's global generator
        torch.manual_seed(spec.seed)
        adapted = get_peft_model(model, config)
    # The adapter trains in float32 whatever the base's dtype: steps of 1e-5 vanish in bf16.
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted  # pyright: ignore[reportReturnType]  # PEFT's union with a mixed model that we do not ask for
