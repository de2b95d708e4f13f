"""What the verifiers have in common: read the text of a completion and compare it with a column of the row.

Every verifier here takes time linear in the text, because the text is the model's and the model is rewarded for
whatever makes a verifier give up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.text import completion_text, text_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Compare a completion with the row's gold answer. A subclass says how, in `score`.

    Thoughts are cut off before anything else: see `without_thoughts`.
    """

    column: str = "answer"
    """Column with the gold answer. A row without one (None) abstains."""
    inside: str = ""
    """Read only the last `<inside>...</inside>`; a completion without it scores 0. Empty reads all of it."""

    isolated: ClassVar[bool] = False
    """Linear time and no foreign code, so a worker process would only cost."""
    decides_correctness: ClassVar[bool] = True
    """Among several rewards the first verifier says which answers are right."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        golds = column_values(self, columns, self.column)
        return [self._score_one(completion, gold) for completion, gold in zip(completions, golds, strict=True)]

    def _score_one(self, completion: Any, gold: Any) -> float | None:
        if gold is None:
            return None
        text = without_thoughts(completion_text(completion))
        if self.inside and text is not None:
            text = text_inside(text, self.inside)
        score = self.score(text or "", str(gold))
        # Whether a row abstains depends on its gold answer alone, so `score` decides that for empty text too.
        return 0.0 if text is None and score is not None else score

    def score(self, text: str, gold: str) -> float | None:
        """The reward of one completion; None when the gold answer cannot be used."""
        raise NotImplementedError


def column_values(verifier: Any, columns: Mapping[str, Any], name: str) -> Sequence[Any]:
    if name not in columns:
        raise InputError(f"{verifier!r} needs the column {name!r}, got {', '.join(sorted(columns)) or 'no columns'}")
    return columns[name]


def without_thoughts(text: str) -> str | None:
    """The answer: what stands after the last `</think>`, up to a `<think>` that is never closed.

    A text without these tags is all answer. One that is nothing but an unclosed thought has none.

    >>> without_thoughts("<think>41?</think> 42"), without_thoughts("<think>42")
    (' 42', None)
    """
    answer, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return None if opened and not answer.strip() else answer
