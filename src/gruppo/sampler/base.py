"""What the trainer asks of any sampler."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gruppo.sampler.params import SamplingParams
from gruppo.types import Prompt, SampleResponse

if TYPE_CHECKING:
    from gruppo.model.transformers_model import TransformersModel

PromptLike = Prompt | str | Sequence[int]
"""A prompt of the data set, a text to encode, or token ids."""


class Sampler(Protocol):
    """Prompts in, groups of sequences out, in the order of the prompts."""

    def sample(
        self, batch: Sequence[PromptLike], num_samples: int = 1, params: SamplingParams | None = None
    ) -> list[SampleResponse]:
        """Draw `num_samples` completions of each prompt."""
        ...

    def sync(self, model: "TransformersModel") -> dict[str, float]:
        """Sample from this model's weights from now on; returns what there is to report."""
        ...

    def close(self) -> None: ...


def token_ids(prompt: PromptLike, tokenizer: Any) -> tuple[int, ...]:
    """The tokens of a prompt in any of its forms."""
    if isinstance(prompt, Prompt):
        return prompt.token_ids
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    return tuple(prompt)


def prompt_index(prompt: PromptLike, position: int) -> int:
    """What identifies a prompt for its random draws: its row in the data set, or its place in the batch."""
    return prompt.index if isinstance(prompt, Prompt) else position
