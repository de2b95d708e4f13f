"""What a part says about itself, so that nobody has to know it by name.

A part is any function with the right signature. What follows from it (may the head walk over windows? can a sequence
without advantage be left out?) is read from attributes that it may have, with a safe answer when it does not.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

FACTS: dict[str, Any] = {
    "is_per_token": False,  # a token's result depends on that token alone, and on numbers of the whole step
    "is_zero_without_advantage": False,  # surrogate, select: no value and no gradient where the advantage is 0
    "needs": frozenset(),  # optional inputs it cannot do without
    "draws_tokens": False,  # it draws tokens at random, so it must know their places in the step
    "has_sequence_ratio": False,  # level: one geometric-mean ratio per sequence, which is what metrics should count
    "divides_by_sampler": False,  # level: the ratio is over the sampler's probability, so it holds rho already
    "weighs_by_rho": False,  # correction: multiplies by rho
    "caps_every_sign": False,  # surrogate: the bound acts whatever the sign of the advantage
    "is_local": False,  # aggregate: its denominator is that of one call, not of the step
}


def fact(part: Any, name: str) -> Any:
    """What a part says of itself under `name`, or the safe answer."""
    return getattr(part, name, FACTS[name])


def says(**facts: Any) -> Callable[[F], F]:
    """Attach facts to a function.

    >>> @says(is_per_token=True)
    ... def squared(delta_T, log_ratio_T):
    ...     return delta_T**2
    >>> fact(squared, "is_per_token"), fact(squared, "draws_tokens")
    (True, False)
    """
    unknown = set(facts) - set(FACTS)
    assert not unknown, unknown

    def attach(function: F) -> F:
        for name, value in facts.items():
            setattr(function, name, value)
        return function

    return attach


def describe(part: Any) -> str:
    """A part in words: what it says of itself, or the first line of its docstring."""
    if type(part).__str__ is not object.__str__ and not isinstance(part, type):
        return str(part)
    documentation = (getattr(part, "__doc__", None) or "").strip()
    return documentation.splitlines()[0] if documentation else getattr(part, "__name__", repr(part))
