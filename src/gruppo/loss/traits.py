"""Traits of a part: what follows from it, read by PolicyLoss, the trainer and metrics instead of its type.

A part is any callable with the right signature. Without traits it gets the safe answer to every question.
"""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["part"]

P = TypeVar("P", bound=Callable[..., Any])

TRAITS: dict[str, Any] = {
    "per_token": False,  # a token's result depends on that token alone, and on numbers of the whole step
    "zero_without_advantage": False,  # surrogate, term: no value and no gradient where the advantage is 0
    "needs": (),  # optional inputs it cannot do without: ref_logps, sampler_logps, entropies
    "draws_tokens": False,  # weight: it draws tokens at random, so it must know their places in the step
    "holds_rho": False,  # level: its ratio is over the sampler; weight: it multiplies by rho = old / sampler
    "sequence_ratio": False,  # level: one ratio per sequence, so metrics count sequences
    "caps_every_sign": False,  # surrogate: the bound acts whatever the sign of the advantage, so metrics count both
    "survey_reads_policy": True,  # the survey of the step needs log-probs, not only labels and advantages
}


def part(**traits: Any) -> Callable[[P], P]:
    """Declare traits of a function or a class. On a class a trait may be a function of the instance.

    >>> @part(per_token=True, needs={"sampler_logps"})
    ... def gap(inputs):
    ...     return inputs.logps - inputs.sampler_logps
    >>> trait(gap, "per_token"), trait(gap, "draws_tokens")
    (True, False)
    """
    for name in traits:
        if name not in TRAITS:
            raise TypeError(f"part() got an unexpected trait {name!r}; there are {', '.join(TRAITS)}")

    def attach(made: P) -> P:
        for name, value in traits.items():
            setattr(made, name, property(value) if callable(value) else value)
        return made

    return attach


def trait(made: Any, name: str) -> Any:
    """A trait of a part, or the safe answer."""
    return getattr(made, name, TRAITS[name])


def describe(made: Any) -> str:
    """A part in words: its `str`, or the first line of its docstring. Several that are multiplied: their product."""
    if isinstance(made, tuple):
        return describe(made[0]) if len(made) == 1 else " * ".join(f"({describe(each)})" for each in made)
    if type(made).__str__ is not object.__str__ and not isinstance(made, type):
        return str(made)
    documentation = (getattr(made, "__doc__", None) or "").strip()
    return documentation.splitlines()[0] if documentation else getattr(made, "__name__", repr(made))
