"""Errors of gruppo. A message names the field, the value, and what to do.

Each class also derives from the standard exception a caller would expect, so `except ValueError` works. `exit_code` is
the exit code of the command line.
"""

import signal
from importlib import import_module


class GruppoError(Exception):
    """Base of all errors raised on purpose by gruppo."""

    exit_code = 1


class InputError(GruppoError, ValueError):
    """A value given to gruppo (an argument, a tensor, a data row, an option) cannot be used."""

    exit_code = 2


class MissingExtraError(GruppoError, ImportError):
    """An optional dependency is missing; the message names the command that installs it."""

    exit_code = 2


class NumericError(GruppoError, ArithmeticError):
    """Training produced numbers that are not finite and was stopped before they reached the weights."""

    exit_code = 3


class RewardError(GruppoError, RuntimeError):
    """A reward function failed more often than its budget allows or returned something unusable, or ten steps had no
    reward."""

    exit_code = 4


class SamplerError(GruppoError, RuntimeError):
    """The sampler is gone, or its answer does not match the request."""

    exit_code = 5


class CheckpointError(GruppoError, RuntimeError):
    """A checkpoint cannot be written, or is damaged, incomplete or not from gruppo."""

    exit_code = 6


class RankError(GruppoError, RuntimeError):
    """Another process of the run ended or hangs; that process reports the cause."""

    exit_code = 7


class Terminated(SystemExit):
    """SIGTERM before training began (SIGHUP: 129, SIGUSR1: 138). Not `SystemExit`, which a user's module may raise."""

    exit_code = 143

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)


def require(extra: str, module: str, what_for: str) -> MissingExtraError:
    """Error for a missing `module` of an optional `extra`, with the command to install it."""
    return MissingExtraError(f"{what_for} needs {module!r}, which is not installed; pip install 'gruppo[{extra}]'")


def require_train(what_for: str, *modules: str) -> None:
    """Raise if a package of the extra `train` is missing: `pip install gruppo` alone brings only the losses."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise require("train", module, what_for) from error
