"""Engine: what vLLMSampler needs of vLLM, in this process or behind HTTP; its requests, its answers and their check."""

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gruppo.errors import InputError, SamplerError
from gruppo.sampler.base import Poll, Samples, SamplingParams, stopped_at, texts_of
from gruppo.sampler.vllm.worker import EXTENSION
from gruppo.types import Prompt, StopReason, Trajectory
from gruppo.weights.source import linear_layers

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
    max_new_tokens: int | None = None
    """Token limit of these completions; None: that of the params."""
    copies: int = 1
    """Copies of each completion in the response: greedy ones are drawn once."""
    future: Future[Samples] = field(default_factory=Future, repr=False, compare=False)

    def limit(self, params: SamplingParams) -> int:
        """Token limit of these completions."""
        return params.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens

    def options(self, params: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
        """The request to vLLM, but for the prompt, under vLLM's names."""
        return {
            "n": self.num_samples,
            "seed": self.seed,
            "temperature": params.temperature,
            "max_tokens": self.limit(params),
            "stop": list(params.stop),
            "stop_token_ids": list(stop_ids),
            "logprobs": 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion as an engine reports it, without text: gruppo decodes the tokens, since it trains on those."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    stop_reason: StopReason


Received = dict[str, int]
"""Receipt of an engine for a folder of weights: `tensors` and `bytes`, by its own count."""


class Engine(Protocol):
    """Generates and scores under the weights that were loaded last."""

    name: str
    is_remote: bool
    """True if it runs in another process. An engine in this process runs in the thread that calls it."""
    poll: Poll
    """Cancellation hook, called while the engine works or is waited for; raise to abort."""
    deadline_s: float = 600.0
    """Limit of each call; EngineLost is raised when it passes."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a completion."""
    has_other_requests: bool = False
    """True if requests keep running while weights are loaded."""

    def wait_until_ready(self) -> None:
        """Return once it answers. One in this process is ready as soon as it is made."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """The completions of each request, in order."""
        ...

    def logps_of(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of each row's tokens but the first."""
        ...

    def load_weights(self, folder: Path) -> Received | None:
        """Take all weights from a folder. None: the engine cannot report what it read."""

    def load_adapter(self, folder: Path) -> Received | None:
        """Take the adapter in a folder, in the place of the last one."""

    def sleep(self) -> None:
        """Free memory until the next call. A server has a GPU of its own, and frees nothing."""

    def revive(self) -> None:
        """Restart after EngineLost, with the weights of the first start."""

    def close(self) -> None: ...


def response(
    request: Request,
    completions: Sequence[Completion],
    params: SamplingParams,
    *,
    tokenizer: Any,
    end_ids: Collection[int],
    vocabulary: int,
    versions: tuple[int, int],
) -> Samples:
    """The answer to a request as trajectories. Raises SamplerError, with what came, if it cannot be used."""
    if len(completions) != request.num_samples:
        raise SamplerError(f"vLLM gave {len(completions)} completions where {request.num_samples} were asked for")
    limit, made = request.limit(params), []
    for c in completions:
        problems = {
            "it is empty, though the end token would be in it": not c.tokens,
            "it lacks log-probs": len(c.logps) != len(c.tokens),
            "a log-prob is not finite, or above 0": not all(math.isfinite(x) and x < 1e-3 for x in c.logps),
            f"a token is outside the vocabulary of {vocabulary}": not all(0 <= t < vocabulary for t in c.tokens),
            f"it is longer than max_new_tokens={limit}": len(c.tokens) > limit,
            f"it was cut before max_new_tokens={limit}": c.stop_reason == "length" and len(c.tokens) < limit,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise SamplerError(
                    f"vLLM's answer cannot be used: {problem}; it has {len(c.tokens)} tokens {c.tokens[:8]} and "
                    f"{len(c.logps)} log-probs {c.logps[:4]}, stop_reason={c.stop_reason!r}"
                )
    for c, whole in zip(completions, texts_of(tokenizer, [list(c.tokens) for c in completions]), strict=True):
        ended = stopped_at(tokenizer, c.tokens, params.stop, end_ids)
        length, text = ended or (len(c.tokens), whole)
        made.append(
            Trajectory(
                prompt=request.prompt,
                tokens=c.tokens[:length],
                logps=c.logps[:length],
                text=text,
                stop_reason="stop" if ended else c.stop_reason,
                versions=versions,
            )
        )
    return tuple(made * request.copies)


# --- starting one -------------------------------------------------------------------------------------------------


def engine_arguments(
    *,
    model: str,
    dtype: str,
    max_model_len: int,
    lora: Any = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of an engine that is started here, in this process or as a server, under the names of `vllm.LLM`.

    Args:
        model: folder or hub id of the weights to start from.
        max_model_len: longest prompt and completion together.
        lora: the adapter that will be loaded, with its rank and targets; None: whole weights will be.
        options: further arguments under vLLM's names; they override the ones here.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer scores them
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }
    if lora is not None:  # vLLM needs rank and layers at its start, and wraps no others
        if lora.modules_to_save:
            raise InputError(
                f"modules_to_save={list(lora.modules_to_save)}: vLLM takes adapters without whole modules only; leave "
                "it out, or use sampler=torch"
            )
        rank = next((r for r in RANKS if r >= lora.rank), None)
        if rank is None:
            raise InputError(
                f"lora_rank={lora.rank} is more than vLLM's largest, {RANKS[-1]}; lower it, or use sampler=torch"
            )
        targets = linear_layers(model) if lora.targets == "all-linear" else lora.targets
        # vLLM goes by the last part of a name; PEFT also takes whole ones.
        names = {name.rpartition(".")[2] for name in ([targets] if isinstance(targets, str) else targets)}
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        arguments["lora_target_modules"] = sorted(names) or None
    if _has_gpu():  # a third of its memory, freed while the trainer works
        arguments |= {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True}
    else:  # no graphs, a small cache, no prompt in parts: vLLM 0.32 then moves generators back, and a CPU's cannot
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "enable_chunked_prefill": False}
    return arguments | dict(options or {})


def platform_settings() -> dict[str, str]:
    """Environment of vLLM. On a CPU it would compile the gather of log-probs, which takes longer than it can save."""
    return {} if _has_gpu() else {"TORCH_COMPILE_DISABLE": "1"}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
