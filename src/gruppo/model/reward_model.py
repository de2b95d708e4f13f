"""RewardModel: a sequence classifier of transformers with one output, as a reward function."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gruppo.errors import InputError
from gruppo.task.template import render
from gruppo.weights.source import context_length, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ARCHITECTURE = "ForSequenceClassification"


@dataclass(eq=False, kw_only=True)
class RewardModel:
    """Score of prompt and completion by the one output of a model, whatever its scale.

    A conversation goes through the model's own chat template; text is joined and gets the tokenizer's special tokens.
    What is beyond the model's context is cut off. The weights are loaded at the first call.
    """

    model: str
    """Folder, hf://org/name, ms://org/name or hub id."""
    batch_size: int = 8
    """Completions of one forward pass."""

    isolated: ClassVar[bool] = False
    """In the trainer's process, which has the GPU."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"batch_size of reward model {self.model!r} must be at least 1, got {self.batch_size}")
        config = load_config(self.model)
        names = ", ".join(config.architectures or ["no architecture"])
        if not names.endswith(_ARCHITECTURE):
            raise InputError(
                f"reward {self.model!r} is a {names}, which has no score head; a reward model is a model "
                f"{_ARCHITECTURE} with one label"
            )
        if config.num_labels != 1:
            raise InputError(
                f"reward {self.model!r} has {config.num_labels} labels, and a reward is one number; use a model with "
                "num_labels=1"
            )

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        is_chat = not all(isinstance(prompt, str) for prompt in prompts)
        pairs = list(zip(prompts, completions, strict=True))
        rendered = iter(
            self._render([_joined(prompt, answer) for prompt, answer in pairs if not isinstance(prompt, str)])
        )
        texts = [prompt + answer if isinstance(prompt, str) else next(rendered) for prompt, answer in pairs]
        longest = context_length(self._loaded)
        scores: list[float | None] = []
        with torch.no_grad():
            for start in range(0, len(texts), self.batch_size):
                batch: Any = self._tokenizer(
                    texts[start : start + self.batch_size],
                    add_special_tokens=not is_chat,  # a template writes them itself
                    padding=True,
                    truncation=longest is not None,
                    max_length=longest,
                    return_tensors="pt",
                )
                logits = self._loaded(**batch.to(self._loaded.device)).logits
                scores += logits[:, 0].float().tolist()
        return scores

    def _render(self, conversations: Sequence[Any]) -> list[str]:
        """Conversations as text, by the template of the reward model."""
        if not conversations:
            return []
        if not self._tokenizer.chat_template:
            raise InputError(
                f"the prompts are conversations, and reward model {self.model!r} has no chat template; use one that "
                "has, or give the prompts as text"
            )
        try:
            return [render(turns, self._tokenizer, add_generation_prompt=False) for turns in conversations]
        except InputError as error:  # of one completion: an error of this call, and not of the run
            raise ValueError(f"reward model {self.model!r}: {error}") from error

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        tokenizer = load_tokenizer(self.model)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "right"  # the score is read at the last token before the padding
        return tokenizer

    @cached_property
    def _loaded(self) -> "PreTrainedModel":
        is_cuda = torch.cuda.is_available()
        model = load_model(self.model, dtype="auto" if is_cuda else torch.float32, head="SequenceClassification")
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        model.config.pad_token_id = self._tokenizer.pad_token_id
        torch.nn.Module.to(model, "cuda" if is_cuda else "cpu")
        return model.eval()


def _joined(prompt: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
    """The conversation; a turn that the assistant had begun in the prompt and its completion are one."""
    if prompt[-1]["role"] != "assistant":
        return [*prompt, *answer]
    first, *rest = answer
    return [*prompt[:-1], {**first, "content": prompt[-1]["content"] + first["content"]}, *rest]
