"""Configurations of other trainers as one of a run here: what maps exactly, what differs in maths, what has no
counterpart.

    >>> made = convert("trl", ["--num_generations", "4", "--per_device_train_batch_size", "8", "--beta", "0.04"])
    >>> made.values["group_size"], made.values["prompts_per_step"], made.values["beta"]
    (4, 2, 0.04)
"""

from collections.abc import Sequence
from typing import Literal

from gruppo.convert.conversion import Conversion
from gruppo.convert.open_instruct import from_open_instruct
from gruppo.convert.read import read_flags, read_options
from gruppo.convert.trl import from_trl, script_options
from gruppo.convert.twinkle import from_twinkle
from gruppo.errors import InputError
from gruppo.run.reader import at_home

__all__ = ["Conversion", "convert"]


def convert(peer: Literal["trl", "open_instruct", "twinkle"], words: Sequence[str]) -> Conversion:
    """The options of a run from the words of a command line: a file, or the arguments of the peer's script."""
    if peer == "twinkle":
        return from_twinkle(words)
    if peer == "trl" and words and words[0].endswith(".py") and at_home(words[0]).is_file():
        options = script_options(words[0], read_flags(words[1:]))
    else:
        options = read_options(words)
    try:
        return from_trl(options) if peer == "trl" else from_open_instruct(options)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"an option has a value that {peer} itself would not take: {error}") from error
