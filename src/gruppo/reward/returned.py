"""Check what a reward function returned: one number or None per completion, nothing else.

The check is strict because every lenient one has cost somebody a run: a single value that was broadcast to all
completions, a None that turned all advantages into NaN.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gruppo.errors import InputError

FLOAT32_MAX = 3.4028234663852886e38
"""Rewards end as float32 tensors; what is larger would be infinite there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Usable values, and which of them were not numbers."""

    values: list[float | None]
    non_finite: list[int]
    """Places where NaN or an infinity was returned; the value there is None."""


def check_returned(name: str, returned: Any, num: int) -> Checked:
    """Turn the return value of reward `name` for `num` completions into floats and None, or raise `InputError`.

    >>> check_returned("f", [True, 2, None, float("nan")], 4)
    Checked(values=[1.0, 2.0, None, None], non_finite=[3])
    """
    # Arrays and tensors, on whatever device, become plain lists; a 0-d one becomes a scalar and is refused below.
    plain = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(plain, list | tuple):
        raise InputError(
            f"reward {name!r} returned {_describe(returned)} for {num} completions; return a list with one float or "
            f"None per completion{_remedy(returned)}"
        )
    if len(plain) != num:
        raise InputError(
            f"reward {name!r} returned {len(plain)} values for {num} completions; return one float or None per "
            "completion (nothing is broadcast)"
        )
    values: list[float | None] = []
    non_finite: list[int] = []
    for index, item in enumerate(plain):
        value = None if item is None else _as_float(name, index, item)
        if value is not None and not abs(value) <= FLOAT32_MAX:  # also true for NaN
            non_finite.append(index)
            value = None
        values.append(value)
    return Checked(values=values, non_finite=non_finite)


def _as_float(name: str, index: int, item: Any) -> float:
    if isinstance(item, bool | int | float):
        return _float_or_inf(item)
    # 0-d arrays and tensors have an empty shape; one of shape [1] is a nested value although float() takes it.
    if not isinstance(item, str | bytes) and hasattr(item, "__float__") and tuple(getattr(item, "shape", ())) == ():
        return _float_or_inf(item)
    raise InputError(
        f"reward {name!r} returned {_describe(item)} as value {index}; each value must be a float, an int, a bool or "
        f"None{_remedy(item)}"
    )


def _float_or_inf(item: Any) -> float:
    try:
        return float(item)
    except OverflowError:  # an int beyond the range of a float
        return math.inf


def _remedy(value: Any) -> str:
    """A hint for a dict, which is what reward functions of verl return."""
    if not isinstance(value, Mapping):
        return ""
    return '. Of a dict return its number, as in result["score"]'


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
