"""LoRA through PEFT, on a base in full precision or in 4 bits.

The adapter starts at zero, so that the policy is the base model before its first step: ratio exactly 1, KL
exactly 0. Dropout would break that and is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gruppo.errors import InputError
from gruppo.process.by_name import did_you_mean
from gruppo.weights.source import linear_layers

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
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that train whole beside the adapter, and are saved with it."""
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
        modules_to_save=tuple(config.modules_to_save or ()),
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
            f"{_listed(there.targets)}), which a new one would hide. "
            "Leave lora out to go on with it, or fold it into its base first: gruppo export FOLDER NEW --merge"
        )

    _check_names(model, spec)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  # PEFT divides; any number will do
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        modules_to_save=list(spec.modules_to_save) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        revision=getattr(model.config, "_commit_hash", None),  # of a base from a hub
    )
    with _standing_in(model), torch.random.fork_rng(devices=[]):  # PEFT draws from torch's global generator
        torch.manual_seed(spec.seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:  # layers that PEFT refuses, as on Mamba
            raise InputError(
                f"lora targets {_listed(spec.targets)} cannot be adapted: {error} Name others; the linear layers are "
                f"{', '.join(linear_layers(model))}"
            ) from error
    # The adapter trains in float32 whatever the base's dtype: steps of 1e-5 vanish in bf16.
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted  # pyright: ignore[reportReturnType]  # PEFT's union with a mixed model that we do not ask for


@contextmanager
def _standing_in(model: "PreTrainedModel") -> Iterator[None]:
    """Zeros that take no memory in the place of weights on the meta device: PEFT puts an adapter where its layer is."""
    empty = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.is_meta]
    for module, name, parameter in empty:
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = torch.nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    yield
    for module, name, parameter in empty:
        stand_in = module._parameters[name]
        assert stand_in is not None
        parameter.requires_grad = stand_in.requires_grad
        module._parameters[name] = parameter


def merge(model: "PeftModel") -> Any:
    """The base with the adapter folded into it, and the modules that trained whole in their places."""
    _refuse_tied(model.get_base_model(), lora_of(model) or LoraSpec())
    return model.merge_and_unload()  # type: ignore[operator]  # PEFT's


def _check_names(model: "PreTrainedModel", spec: LoraSpec) -> None:
    """Refuse names that no layer has. PEFT leaves out what it does not find, as long as it finds anything."""
    names = [name for name, _ in model.named_modules()]
    for option, wanted in (("targets", spec.targets), ("modules_to_save", spec.modules_to_save)):
        for name in () if isinstance(wanted, str) else wanted:
            # PEFT takes the end of a module's name for a module that trains whole, its last parts for a target.
            end = name if option == "modules_to_save" else f".{name}"
            if any(module == name or module.endswith(end) for module in names):
                continue
            last = sorted({module.rpartition(".")[2] for module in names} - {""})
            choice = linear_layers(model) if option == "targets" else [part for part in last if not part.isdigit()]
            raise InputError(
                f"lora {option} {name!r}: the model has no such layer{did_you_mean(name, choice)}; it has "
                f"{', '.join(choice)}"
            )
    _refuse_tied(model, spec)


def _refuse_tied(model: Any, spec: LoraSpec) -> None:
    """Refuse to train the embedding or the head by itself where the two are one matrix."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = [
        name for name, m in model.named_modules() if m in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    for option in ("targets", "modules_to_save"):
        named = getattr(spec, option)
        for name in () if isinstance(named, str) else named:
            if any(f".{end}".endswith(f".{name}") for end in ends):
                raise InputError(
                    f"lora {option} names {name!r}, and the model has one matrix for its embedding and its head "
                    "(tie_word_embeddings): training one of the two would part them, and a merged model holds one "
                    "matrix. Leave it out"
                )


def _listed(targets: str | tuple[str, ...]) -> str:
    return targets if isinstance(targets, str) else ", ".join(targets)
