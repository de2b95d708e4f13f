"""Sampler: the interface the trainer uses, and the forms in which a caller may give prompts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gruppo.errors import InputError
from gruppo.sampler.params import SamplingParams
from gruppo.types import Message, Prompt, SampleResponse

if TYPE_CHECKING:
    from gruppo.model.transformers_model import TransformersModel

PromptLike = Prompt | str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""A prompt of the data set, a text, token ids, chat messages, or a row with `prompt`, `messages` or `input_ids`."""


class Sampler(Protocol):
    """Prompts in, groups of sequences out, in the order of the prompts."""

    is_exact: bool
    """Whether its log-probs are the trainer's own, so that there is no gap to measure or correct."""

    def sample(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[SampleResponse]:
        """Draw `num_samples` completions of each prompt."""
        ...

    def sync(self, model: "TransformersModel") -> dict[str, float]:
        """Sample from this model's weights from now on; returns what there is to report."""
        ...

    def close(self) -> None: ...


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
        from gruppo.task.chat import render_chat

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


def draw_numbers(batch: Sequence[PromptLike], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt number and first sample number of each prompt: what, with seed and step, decides its random draws.

    The prompt number is the row in the data set, or the place in the batch. A prompt that stands there again goes on
    with further samples, so that eight copies with one sample each draw what one copy with eight samples draws.
    """
    seen: Counter[tuple[bool, int]] = Counter()
    numbers, first = [], []
    for position, prompt in enumerate(batch):
        index = prompt.index if isinstance(prompt, Prompt) else position
        key = isinstance(prompt, Prompt), index
        numbers.append(index)
        first.append(seen[key] * num_samples)
        seen[key] += 1
    return np.array(numbers, dtype=np.int64), np.array(first, dtype=np.int64)
