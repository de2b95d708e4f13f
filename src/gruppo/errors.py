"""Errors that name what was expected, what came, where, and what to do.

Every class is also the standard exception a caller would expect, so `except ValueError` keeps working. What a
class means for the command line is its `exit_code`.
"""

import signal
from importlib import import_module


class GruppoError(Exception):
    """Base of all errors raised on purpose by gruppo."""

    exit_code = 1


class InputError(GruppoError, ValueError):
    """A value handed to gruppo (an argument, a tensor, a data row, a config field) cannot be used."""

    exit_code = 2


class MissingExtraError(GruppoError, ImportError):
    """An optional dependency is needed and absent; the text names the command that installs it."""

    exit_code = 2


class NumericError(GruppoError, ArithmeticError):
    """Training produced non-finite numbers and was stopped before they reached the weights."""

    exit_code = 3


class RewardError(GruppoError, RuntimeError):
    """A reward function failed more often than its budget allows, returned something unusable, or no function gave a
    value in ten steps."""

    exit_code = 4


class SamplerError(GruppoError, RuntimeError):
    """The sampler is lost, or answered with something that is not what was asked for."""

    exit_code = 5


class CheckpointError(GruppoError, RuntimeError):
    """A checkpoint cannot be written, or is damaged, incomplete or not one of ours."""

    exit_code = 6


class RankError(GruppoError, RuntimeError):
    """Another process of the run has ended or hangs; it has a report of its own."""

    exit_code = 7


class Terminated(SystemExit):
    """SIGTERM before training began (SIGHUP: 129, SIGUSR1: 138). Not `SystemExit`, which a user's module may raise."""

    exit_code = 143

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)


def require(extra: str, module: str, what_for: str) -> MissingExtraError:
    """The error to raise when `module` of an optional `extra` is absent: it says what to install."""
    return MissingExtraError(f"{what_for} needs {module!r}, which is not installed; pip install 'gruppo[{extra}]'")


def require_train(what_for: str, *modules: str) -> None:
    """Raises where a package of the extra `train` is absent: `pip install gruppo` alone brings the losses."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise require("train", module, what_for) from error
