"""Engine: what vLLMSampler needs of vLLM, in this process or behind HTTP; its requests, its answers and their check."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gruppo.errors import InputError, SamplerError
from gruppo.sampler.base import Poll, SamplingParams
from gruppo.sampler.vllm.worker import EXTENSION
from gruppo.types import Prompt, SampleResponse, StopReason, Trajectory

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM has kernels for; an adapter takes the next larger one."""


class EngineLost(SamplerError):
    """The engine died, hung or cannot be reached: restart it, load its weights and repeat the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`num_samples` completions of a prompt. Sample i is drawn from `seed + i`, whatever else is in the batch."""

    prompt: Prompt
    num_samples: int
    seed: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion as an engine reports it."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Tensors and bytes that an engine reports to have read from a folder of weights."""

    tensors: int
    bytes: int


class Engine(Protocol):
    """Generates and scores under the weights that were loaded last."""

    name: str
    is_remote: bool
    """Whether it works in another process. One in this process works in the thread that calls it."""
    poll: Poll
    """Cancellation hook, called while the engine works or is waited for; raise to abort."""

    def wait_until_ready(self, deadline_s: float) -> None:
        """Return once it answers."""
        ...

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, stop_ids: Sequence[int], deadline_s: float
    ) -> list[list[Completion]]:
        """The completions of each request, in order. Raises EngineLost when the deadline passes."""
        ...

    def logps_of(self, rows: Sequence[Sequence[int]], deadline_s: float) -> list[list[float]]:
        """Log-probs at temperature 1 of each row's tokens but the first."""
        ...

    def load_weights(self, folder: Path, deadline_s: float) -> Received | None:
        """Take all weights from a folder. None: the engine cannot report what it read."""
        ...

    def load_adapter(self, folder: Path, deadline_s: float) -> Received | None:
        """Take the adapter in a folder, in the place of the last one."""
        ...

    def sleep(self) -> None:
        """Free memory until the next call, where the platform can."""
        ...

    def revive(self, deadline_s: float) -> None:
        """Restart after EngineLost, with the weights of the first start."""
        ...

    def close(self) -> None: ...


# --- answers ------------------------------------------------------------------------------------------------------


def check_answer(request: Request, completions: Sequence[Completion], params: SamplingParams, vocabulary: int) -> None:
    """Raise SamplerError for an answer that is not what was asked for, with what came."""
    if len(completions) != request.num_samples:
        raise SamplerError(f"vLLM gave {len(completions)} completions where {request.num_samples} were asked for")
    for c in completions:
        problem = _problem(c, params, vocabulary)
        if problem is not None:
            raise SamplerError(
                f"vLLM's answer cannot be used: {problem}; it has {len(c.tokens)} tokens {c.tokens[:8]} and "
                f"{len(c.logps)} log-probs {c.logps[:4]}, stop_reason={c.stop_reason!r}"
            )


def response(request: Request, completions: Sequence[Completion], *, copies: int, version: int) -> SampleResponse:
    """The completions of a prompt as trajectories; `copies` of each, where greedy ones are asked for once."""
    made = [
        Trajectory(
            prompt=request.prompt,
            tokens=c.tokens,
            logps=c.logps,
            text=c.text,
            stop_reason=c.stop_reason,
            versions=(version, version),
        )
        for c in completions
    ]
    return SampleResponse(sequences=tuple(made * copies))


def _problem(c: Completion, params: SamplingParams, vocabulary: int) -> str | None:
    if not c.tokens:
        return "it is empty, though the end token would be in it"
    if len(c.logps) != len(c.tokens):
        return "it lacks log-probs"
    if not all(math.isfinite(x) and x < 1e-3 for x in c.logps):
        return "a log-prob is not finite, or above 0"
    if not all(0 <= t < vocabulary for t in c.tokens):
        return f"a token is outside the vocabulary of {vocabulary}"
    if len(c.tokens) > params.max_new_tokens:
        return f"it is longer than max_new_tokens={params.max_new_tokens}"
    if c.stop_reason == "length" and len(c.tokens) < params.max_new_tokens:
        return f"it was cut before max_new_tokens={params.max_new_tokens}"
    return None


# --- starting one -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Arguments of an engine that is started here, in this process or as a server."""

    model: str
    """Folder or hub id of the weights to start from."""
    dtype: str
    max_model_len: int
    """Longest prompt and completion together."""
    lora_rank: int | None = None
    """Rank of the adapters that will be loaded; None: whole weights will be."""
    lora_targets: tuple[str, ...] = ()
    """Layers that the adapters are on; vLLM wraps no others."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments under vLLM's names; they override the ones here."""

    def arguments(self) -> dict[str, Any]:
        """The arguments under the names of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer scores them
            "generation_config": "vllm",  # no sampling defaults from the model's folder
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
        }
        if self.lora_rank is not None:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next_rank(self.lora_rank)}
            arguments["lora_target_modules"] = list(self.lora_targets) or None
        return arguments | _platform_arguments() | dict(self.options)


def next_rank(rank: int) -> int:
    """The smallest adapter rank of vLLM that holds this one."""
    found = next((r for r in RANKS if r >= rank), None)
    if found is None:
        raise InputError(f"lora_rank={rank} is more than vLLM's largest, {RANKS[-1]}; lower it, or use sampler=torch")
    return found


def platform_settings() -> dict[str, str]:
    """Environment of vLLM. On a CPU it would compile the gather of log-probs, which takes longer than it can save."""
    return {} if _has_gpu() else {"TORCH_COMPILE_DISABLE": "1"}


def _platform_arguments() -> dict[str, Any]:
    """On a CPU: no graphs, a small cache. On a GPU: a third of its memory, freed while the trainer works."""
    if _has_gpu():
        return {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True}
    return {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
