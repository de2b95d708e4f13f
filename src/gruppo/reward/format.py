"""Rewards for the form of a completion: blocks in tags and nothing else, or a thought and then the answer.

The usual regular expression for this takes quadratic time on hostile text; `str.find` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.text import completion_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFormat:
    """1 when the completion is `<think>...</think><answer>...</answer>` and nothing but white space around, else 0.

    Each tag must occur once and hold something.

    >>> TagFormat()(completions=["<think>2+2</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    """

    tags: tuple[str, ...] = ("think", "answer")
    """Names of the blocks, in their order."""
    prefix: str = ""
    """What the prompt has already opened for the model, such as `<think>`."""

    isolated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(self.tags))  # a list, when it comes from a config file
        if not self.tags or len(set(self.tags)) != len(self.tags):
            raise InputError(f"tags must be different names, at least one, got {self.tags!r}")

    def __call__(self, completions: Sequence[Any]) -> list[float | None]:
        return [float(self.fits(self.prefix + completion_text(completion))) for completion in completions]

    def fits(self, text: str) -> bool:
        rest = text if all(_occurs_once(text, tag) for tag in self.tags) else None
        for tag in self.tags:
            rest = None if rest is None else _after_block(rest, tag)
        return rest is not None and not rest.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkFormat:
    """1 when the completion is `<think>...</think>` and an answer after it, with only white space before; else 0.

    Each tag must occur once, and neither the thought nor the answer may be empty.

    >>> ThinkFormat()(completions=["<think>2+2</think> It is 4.", "<think>2+2</think>", "It is 4."])
    [1.0, 0.0, 0.0]
    """

    prefix: str = ""
    """What the prompt has already opened for the model, such as `<think>`."""

    isolated: ClassVar[bool] = False

    def __call__(self, completions: Sequence[Any]) -> list[float | None]:
        return [float(self.fits(self.prefix + completion_text(completion))) for completion in completions]

    def fits(self, text: str) -> bool:
        answer = _after_block(text, "think") if _occurs_once(text, "think") else None
        return answer is not None and bool(answer.strip())


def _occurs_once(text: str, tag: str) -> bool:
    return text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1


def _after_block(text: str, tag: str) -> str | None:
    """What follows the block `<tag>...</tag>` that `text` begins with; None when there is none or it holds nothing."""
    block, closing, rest = text.lstrip().partition(f"</{tag}>")
    opening = f"<{tag}>"
    is_block = closing and block.startswith(opening) and block[len(opening) :].strip()
    return rest if is_block else None


tag_format = TagFormat()
think_format = ThinkFormat()
