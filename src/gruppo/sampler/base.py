"""Sampler: the base class of all samplers, and the forms in which a caller may give prompts."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.sampler.params import SamplingParams
from gruppo.types import Message, Prompt, SampleResponse
from gruppo.weights import Published
from gruppo.weights.canary import TrainedModel

PromptLike = Prompt | str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""A prompt of the data set, a text, token ids, chat messages, or a row with `prompt`, `messages` or `input_ids`."""

Poll = Callable[[], None]
"""Cancellation hook: called while waiting; raise to abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Completions of one prompt, with the numbers that decide their random draws.

    Completion i is a function of the weights, the prompt's tokens, the params and (seed, step, number, first + i).
    Other requests in the same batch do not matter.
    """

    prompt: Prompt
    num_samples: int
    seed: int
    step: int
    number: int
    """Number of the prompt: its row in the data set, or its place in the batch."""
    first: int = 0
    """Sample number of the first completion."""


class Sampler(ABC):
    """Base class: prompts in, groups of trajectories out."""

    is_exact: ClassVar[bool] = False
    """Whether its log-probs are the trainer's own, so that there is no gap to measure or correct."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.calls = 0
        """Calls of `sample` without a step."""
        self.loaded: Published | None = None
        """The weights that `load` took last; None: those of the start, or the trainer's own."""

    @abstractmethod
    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[SampleResponse]]:
        """Ask for completions; one future per request, in order. A future that is cancelled frees the sampler.

        The draws are decided by the requests: `seed` and `step` of the params are not read.
        """

    def sample(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[SampleResponse]:
        """Draw `num_samples` completions of each prompt. The same seed, step and weights give the same tokens."""
        check_call(batch, num_samples, params)
        params = params or SamplingParams()
        if not batch:
            return []
        futures = self.submit(self.requests(batch, num_samples, params), params)
        try:
            wait(futures)  # all of them: when one has failed, no other is left running
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def requests(self, batch: Sequence[PromptLike], num_samples: int, params: SamplingParams) -> list[SampleRequest]:
        """The requests that `sample` submits."""
        prompts = [read_prompt(prompt, i, self.tokenizer) for i, prompt in enumerate(batch)]
        step = params.step
        if step is None:
            step = self.calls
            self.calls += 1
        return [
            SampleRequest(
                prompt=prompt, num_samples=num_samples, seed=params.seed, step=step, number=number, first=first
            )
            for prompt, (number, first) in zip(prompts, draw_numbers(batch, num_samples), strict=True)
        ]

    @abstractmethod
    def load(self, published: Published) -> dict[str, float]:
        """Sample from published weights from now on, and prove it; returns what there is to report."""

    @abstractmethod
    def sync(self, model: TrainedModel) -> dict[str, float]:
        """Publish a model's weights and load them, in one call."""

    @abstractmethod
    def close(self) -> None:
        """Release what the sampler holds."""


def check_call(batch: Any, num_samples: Any, params: Any) -> None:
    """Refuse arguments of `sample` that are not what they should be."""
    if isinstance(batch, str | Prompt | Mapping) or not isinstance(batch, Sequence):
        raise InputError(
            f"sample takes a list of prompts, got {type(batch).__name__} {str(batch)[:60]!r}; for one prompt write "
            "sample([prompt])"
        )
    if isinstance(num_samples, SamplingParams):
        raise InputError("num_samples must be a whole number, got SamplingParams; pass them as params=...")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise InputError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(f"params must be SamplingParams, got {type(params).__name__}")


def read_prompt(prompt: PromptLike, position: int, tokenizer: Any) -> Prompt:
    """A prompt in any of its forms as a Prompt; one that has no row number gets its `position` in the batch."""
    if isinstance(prompt, Prompt):
        _check_tokens(prompt.token_ids, position)
        return prompt
    value: Any = prompt
    if isinstance(value, Mapping):
        name = next((name for name in ("prompt", "messages", "input_ids") if name in value), None)
        if name is None:
            raise InputError(
                f"prompt {position} is a row without 'prompt', 'messages' or 'input_ids'; it has "
                f"{', '.join(map(repr, value)) or 'nothing'}"
            )
        value = value[name]
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    text = ""
    if isinstance(value, str):
        if tokenizer is None:
            raise InputError(f"prompt {position} is text, and this model has no tokenizer; give token ids")
        ids, text = tuple(tokenizer(value)["input_ids"]), value
    elif isinstance(value, Sequence) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        from gruppo.task.prompts import render_chat

        ids, text = render_chat(value, tokenizer)
    elif isinstance(value, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        ids = tuple(value)
    else:
        raise InputError(
            f"prompt {position} must be a Prompt, a text, token ids, chat messages or a row of a data set, got "
            f"{type(value).__name__} {str(value)[:60]!r}"
        )
    _check_tokens(ids, position)
    source = value if text else ""
    return Prompt(token_ids=ids, text=text, source=source, index=position)


def _check_tokens(ids: tuple[int, ...], position: int) -> None:
    if not ids:
        raise InputError(f"prompt {position} has no tokens; there is nothing to continue")


def draw_numbers(batch: Sequence[PromptLike], num_samples: int) -> list[tuple[int, int]]:
    """Prompt number and first sample number of each prompt: with seed and step they decide its random draws.

    The prompt number is the row in the data set, or the place in the batch. A prompt that occurs again goes on with
    further samples, so that eight copies with one sample each draw what one copy with eight samples draws.
    """
    seen: Counter[tuple[bool, int]] = Counter()
    numbers = []
    for position, prompt in enumerate(batch):
        index = prompt.index if isinstance(prompt, Prompt) else position
        key = isinstance(prompt, Prompt), index
        numbers.append((index, seen[key] * num_samples))
        seen[key] += 1
    return numbers
