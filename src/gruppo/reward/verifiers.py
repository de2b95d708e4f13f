"""Rewards for the text of a completion: equal to the row's answer, found by a pattern, or of a given form.

A verifier here takes time linear in the text, because the text is the model's and the model is rewarded for whatever
makes a verifier give up. So tags are found without regular expressions, which are quadratic on hostile text. A reward
without such a bound runs in a worker process with a deadline.
"""

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError

_PUNCTUATION = string.punctuation + "‘’“”«»…–—−¿¡、。，！？：；（）「」"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Base of rewards that compare a completion with the row's gold answer, by `score` of the subclass.

    Thoughts are cut off before anything else: see `without_thoughts`.
    """

    column: str = "answer"
    """Column with the gold answer. A row without one (None) abstains."""
    inside: str = ""
    """Read only the last `<inside>...</inside>`; a completion without it scores 0. Empty reads all of it."""

    isolated: ClassVar[bool] = False
    """Linear time and no foreign code, so a worker process would only cost."""
    decides_correctness: ClassVar[bool] = True
    """Among several rewards, the first verifier decides which answers are right."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise _no_column(self, self.column, columns)
        scores: list[float | None] = []
        for completion, gold in zip(completion_texts(completions), columns[self.column], strict=True):
            if gold is None:
                scores.append(None)
                continue
            text = without_thoughts(completion)
            if self.inside and text is not None:
                text = text_inside(text, self.inside)
            score = self.score(text or "", str(gold))
            # Whether a row abstains depends on its gold answer alone, so `score` decides that for empty text too.
            scores.append(0.0 if text is None and score is not None else score)
        return scores

    def score(self, text: str, gold: str) -> float | None:
        """The reward of one completion; None when the gold answer cannot be used."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch(Verifier):
    """1 when the completion is the answer, apart from white space around it; else 0.

    >>> ExactMatch()(completions=[" 42", "42."], answer=["42", "42"])
    [1.0, 0.0]
    """

    def score(self, text: str, gold: str) -> float | None:
        return float(text.strip() == gold.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizedMatch(Verifier):
    """1 when the completion is the answer apart from case, white space and punctuation around words; else 0.

    >>> NormalizedMatch()(completions=["  the  Eiffel tower. "], answer=["The Eiffel Tower"])
    [1.0]
    """

    def score(self, text: str, gold: str) -> float | None:
        return float(normalize(text) == normalize(gold))


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternMatch:
    """1 when the pattern is found in the completion, else 0. `^`, `$` and `.` mean what they mean in `re`.

    The running time of an expression is unknown, so the match runs in a worker that is killed at the deadline.

    >>> PatternMatch(pattern=r"\\d+ apples")(completions=["12 apples", "a dozen"])
    [1.0, 0.0]
    """

    pattern: str = ""
    """The expression; when empty, each row brings its own in `column`, and a row without one abstains."""
    column: str = "pattern"
    max_chars: int = 2048
    r"""Characters searched, from the end of the completion. Even `\d+ apples` takes quadratic time on a run of digits:
    25 ms for this length, a minute for 100 kB."""

    isolated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _compile(self.pattern)

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.pattern else (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if not self.pattern and self.column not in columns:
            raise _no_column(self, self.column, columns)
        patterns = [self.pattern] * len(completions) if self.pattern else columns[self.column]
        return [
            None if pattern is None else float(_compile(pattern).search(text[-self.max_chars :]) is not None)
            for text, pattern in zip(completion_texts(completions), patterns, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """Base of rewards for the form of a completion: 1 when the text `fits`, else 0."""

    prefix: str = ""
    """Text that the prompt has already opened for the model, such as `<think>`."""

    isolated: ClassVar[bool] = False

    def __call__(self, completions: Sequence[Any]) -> list[float | None]:
        return [float(self.fits(self.prefix + text)) for text in completion_texts(completions)]

    def fits(self, text: str) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFormat(_Format):
    """1 when the completion is `<think>...</think><answer>...</answer>` and nothing but white space around, else 0.

    Each tag must occur once and hold something.

    >>> TagFormat()(completions=["<think>2+2</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    """

    tags: tuple[str, ...] = ("think", "answer")
    """Names of the blocks, in their order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(self.tags))  # a list, when it comes from a config file
        if not self.tags or len(set(self.tags)) != len(self.tags):
            raise InputError(f"tags must be different names, at least one, got {self.tags!r}")

    def fits(self, text: str) -> bool:
        rest = _after_blocks(text, self.tags)
        return rest is not None and not rest.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkFormat(_Format):
    """1 when the completion is `<think>...</think>` and an answer after it, with only white space before; else 0.

    Each tag must occur once, and neither the thought nor the answer may be empty.

    >>> ThinkFormat()(completions=["<think>2+2</think> It is 4.", "<think>2+2</think>", "It is 4."])
    [1.0, 0.0, 0.0]
    """

    def fits(self, text: str) -> bool:
        answer = _after_blocks(text, ("think",))
        return answer is not None and bool(answer.strip())


@dataclass(frozen=True)
class EnvironmentReward:
    """The reward that the environment of an episode gave itself; None where it gave none.

    >>> EnvironmentReward()(completions=["a", "b"], environment_reward=[0.5, None])
    [0.5, None]
    """

    isolated: ClassVar[bool] = False

    def __call__(
        self, completions: Sequence[Any], environment_reward: Sequence[float | None], **_: Any
    ) -> list[float | None]:
        return list(environment_reward)


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """The text of each completion, be it a string or a list of messages: then the assistant's last one, not what a tool
    answered to it."""
    texts: list[str] = []
    for completion in completions:
        content = completion
        if not isinstance(completion, str):
            own = [message for message in completion if message.get("role", "assistant") == "assistant"]
            content = own[-1].get("content") if own else ""
        if isinstance(content, list):  # parts of a multimodal message
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        texts.append(content or "")
    return texts


def text_inside(text: str, tag: str) -> str | None:
    """The content of the last `<tag>...</tag>`, or None without one.

    >>> text_inside("<answer>1</answer> no, <answer>2</answer>", "answer")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def without_thoughts(text: str) -> str | None:
    """The answer: the text after the last `</think>`, up to a `<think>` that is never closed.

    A text without these tags is all answer. One that is nothing but an unclosed thought has none.

    >>> without_thoughts("<think>41?</think> 42"), without_thoughts("<think>42")
    (' 42', None)
    """
    answer, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return None if opened and not answer.strip() else answer


def normalize(text: str) -> str:
    """Lower case, one space between words, no punctuation around words; signs and points of numbers stay.

    Unicode normal forms are left alone: reordering a long run of combining marks takes quadratic time.

    >>> normalize("(B) costs  -$3.50!")
    'b costs -3.50'
    """
    words = (word if word.isalnum() else _bare(word) for word in text.casefold().split())
    return " ".join(word for word in words if word)


def _bare(word: str) -> str:
    core = word.strip(_PUNCTUATION)
    if not core[:1].isdigit():
        return core
    lead = word[: word.find(core)]
    # Without these, "-5" would equal "5" and ".5" would equal "5".
    return ("-" if "-" in lead or "−" in lead else "") + ("." if lead.endswith(".") else "") + core


def _no_column(verifier: Any, name: str, columns: Iterable[str]) -> InputError:
    return InputError(f"{verifier!r} needs the column {name!r}, got {', '.join(sorted(columns)) or 'no columns'}")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InputError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _after_blocks(text: str, tags: Sequence[str]) -> str | None:
    """The rest after the blocks `<tag>...</tag>` that `text` begins with; None unless each occurs once, not empty."""
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in tags):
        return None
    for tag in tags:
        block, _, text = text.lstrip().partition(f"</{tag}>")
        if not block.startswith(f"<{tag}>") or not block.removeprefix(f"<{tag}>").strip():
            return None
    return text


exact_match = ExactMatch()
normalized_match = NormalizedMatch()
pattern_match = PatternMatch()
tag_format = TagFormat()
think_format = ThinkFormat()
