"""Reward for the form of a completion: blocks in tags, in order, and nothing else.

The usual regular expression for this takes quadratic time on hostile text; `str.find` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.reward.verifier import completion_text


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
        rest = text
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            rest = rest.lstrip()
            end = rest.find(closing)
            if not rest.startswith(opening) or not rest[len(opening) : end].strip():
                return False
            rest = rest[end + len(closing) :]
        return not rest.strip()


tag_format = TagFormat()
