"""Text that must equal the row's answer: exactly, or apart from case, spacing and punctuation."""

import string
from dataclasses import dataclass

from gruppo.reward.verifier import Verifier

_PUNCTUATION = string.punctuation + "‘’“”«»…–—−¿¡、。，！？：；（）「」"


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


exact_match = ExactMatch()
normalized_match = NormalizedMatch()
