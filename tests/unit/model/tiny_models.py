"""Random two-layer models of several families, and sequences for them: small enough to check token by token."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gruppo.model import TransformersModel
from gruppo.types import InputFeature

VOCABULARY = 32
EOS = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # logits that differ: the default leaves them almost equal at this width
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}

# What each adds: Llama the plain case with an untied head, Qwen3 norms of queries and keys, Gemma 2 capped logits (3,
# so that the cap bites) and alternating windows, Gemma 3 two rotary bases, GPT-2 learned positions, biases and a
# tied head, Mistral a window that is shorter than the sequences, Cohere and Granite scaled logits, Phi a bias.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, SIZES),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, SIZES | {"tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        SIZES | {"final_logit_softcapping": 3.0, "sliding_window": 4, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        SIZES
        | {
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": (GPT2Config, GPT2LMHeadModel, GPT2_SIZES),
    "mistral": (MistralConfig, MistralForCausalLM, SIZES | {"sliding_window": 4}),
    "cohere": (CohereConfig, CohereForCausalLM, SIZES | {"logit_scale": 0.25}),
    "granite": (GraniteConfig, GraniteForCausalLM, SIZES | {"logits_scaling": 3.0}),
    "phi": (PhiConfig, PhiForCausalLM, {k: v for k, v in SIZES.items() if k != "head_dim"}),
}

# Further families, by the first part of their class names: plain ones, one with experts, then those whose attention
# does not tell packed sequences apart (gpt-oss, Falcon, Bloom), then those with recurrent layers: delta rules (Qwen3.5,
# Qwen3-Next), state spaces (Nemotron-H, Falcon-H1, Mamba, Mamba 2), a short convolution (LFM2), and a recurrence that
# keeps its state in the model and not in a cache (RecurrentGemma).
NO_HEAD_DIM = {k: v for k, v in SIZES.items() if k != "head_dim"}
TOKENS: dict[str, Any] = {
    k: SIZES[k] for k in ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
STATE_SPACE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", NO_HEAD_DIM),
    "gemma": ("Gemma", SIZES),
    "olmo2": ("Olmo2", NO_HEAD_DIM),
    "phi3": ("Phi3", NO_HEAD_DIM),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in NO_HEAD_DIM.items() if k != "num_key_value_heads"}),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS),
    "gpt_oss": (
        "GptOss",
        SIZES
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "falcon": ("Falcon", TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "bloom": ("Bloom", TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "qwen3_5": ("Qwen3_5", SIZES | DELTA_RULE),
    "qwen3_next": ("Qwen3Next", SIZES | DELTA_RULE | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "nemotron_h": (
        "NemotronH",
        {k: v for k, v in SIZES.items() if k != "num_hidden_layers"}
        | {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "time_step_min": 1e-6,  # so that it does not bite: transformers 5.19 has it in whole forwards only
        },
    ),
    "falcon_h1": (
        "FalconH1",
        SIZES
        | {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "lfm2": ("Lfm2", SIZES | {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("Mamba", TOKENS | STATE_SPACE),
    "mamba2": ("Mamba2", TOKENS | STATE_SPACE | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "recurrent_gemma": (
        "RecurrentGemma",
        TOKENS
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "lru_width": 32,
            "attention_window_size": 8,
        },
    ),
}


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32; `changes` are fields of its config."""
    if family in FAMILIES:
        config_class, model_class, sizes = FAMILIES[family]
    else:
        name, sizes = OTHER_FAMILIES[family]
        text_config = getattr(transformers, f"{name}TextConfig", None)
        config_class = text_config or getattr(transformers, f"{name}Config")
        model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    return model_class(config_class(**(sizes | changes))).eval()


def perturb_vectors(model: torch.nn.Module, *, seed: int = 1, size: float = 0.1) -> None:
    """Move biases, norms and time constants away from the zeros and ones at which they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def actor(family: str = "llama", *, double: bool = False, seed: int = 0, **options: Any) -> TransformersModel:
    """The actor over a tiny model; `double` makes it float64, in which sums in another order agree to 1e-12."""
    made = TransformersModel(tiny_model(family, seed=seed), device="cpu", **options)
    if double:
        made.model.double()
    return made


def random_features(
    num: int = 6, *, seed: int = 0, prompt: tuple[int, int] = (1, 7), completion: tuple[int, int] = (1, 8)
) -> list[InputFeature]:
    """Sequences of unequal lengths; the token ids avoid the special ones."""
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(*bounds)))

    return [InputFeature(prompt_ids=tokens(prompt), completion_ids=tokens(completion)) for _ in range(num)]


def logps_one_by_one(
    model: Any, features: Sequence[InputFeature], temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of the completions, one sequence and one token at a time, from the plain logits."""
    logps, entropies = [], []
    with torch.no_grad():
        for feature in features:
            logits = model(input_ids=torch.tensor([feature.input_ids]), use_cache=False).logits[0]
            log_p = (logits.double() / temperature).log_softmax(-1)
            first = len(feature.prompt_ids)
            logps.append(torch.stack([log_p[first + j - 1, t] for j, t in enumerate(feature.completion_ids)]))
            rows = log_p[first - 1 : first - 1 + len(feature.completion_ids)]
            entropies.append(-(rows.exp() * rows).sum(-1))
    return logps, entropies


def largest_gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Largest absolute difference; the shapes must agree."""
    assert [len(a) for a in ours] == [len(b) for b in theirs]
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def perturb_adapter(model: torch.nn.Module, *, seed: int = 1, size: float = 0.1) -> None:
    """Move an adapter away from zero, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
