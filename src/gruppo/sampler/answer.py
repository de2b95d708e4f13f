"""What an engine answered: checked before it is trusted, then as the trainer takes it."""

import math
from collections.abc import Sequence

from gruppo.errors import SamplerError
from gruppo.sampler.engine import Completion, Request
from gruppo.sampler.params import SamplingParams
from gruppo.types import SampleResponse, Trajectory


def check_answer(request: Request, completions: Sequence[Completion], params: SamplingParams, vocabulary: int) -> None:
    """Refuse an answer that is not what was asked for, and say what came."""
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
    """The completions of a prompt as sampled sequences; `copies` of each, where greedy ones are asked for once."""
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
