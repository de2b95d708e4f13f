"""Faults that a test plans into a run, each at a named site of a step.

GRUPPO_FAULTS='[{"site": "committed", "step": 20, "action": "kill"}]' gruppo train ...
"""

import errno
import json
import os
import signal
import time
from dataclasses import dataclass, fields

from gruppo.errors import InputError

SITES = (
    "sync",
    "sample",
    "reward",
    "train",
    "write",
    "eval",
    "checkpoint",
    "recorded",
    "filled",
    "committed",
    "follow",
)
"""The stages of a step as they begin; `recorded`: metrics.jsonl has the step; `filled`: its checkpoint is complete
under a temporary name; `committed`: it has its name, and older checkpoints are still there; `follow`: a rank other than
the first begins its part of an update."""

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}
SIGNALS |= {"usr1": signal.SIGUSR1, "stop": signal.SIGSTOP}
ACTIONS = (*SIGNALS, "raise", "full", "sleep")
"""A signal to this process, a RuntimeError, the error of a full disk, or seconds of sleep."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at a site of a step."""

    site: str
    step: int
    """Steps that were taken before: `train` of the 8th step has 7, `recorded` of it has 8."""
    action: str
    seconds: float = 60.0
    """Length of a sleep."""

    def __post_init__(self) -> None:
        for name, value, known in (("site", self.site, SITES), ("action", self.action, ACTIONS)):
            if value not in known:
                raise InputError(f"GRUPPO_FAULTS: {name}={value!r} is unknown; use one of {', '.join(known)}")

    def strike(self) -> None:
        if self.action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.action])
        elif self.action == "sleep":
            time.sleep(self.seconds)
        elif self.action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            raise RuntimeError(f"fault planned at {self.site} of step {self.step}")


def parse(text: str) -> list[Fault]:
    """Faults from JSON: a list of objects with the fields of `Fault`."""
    try:
        return [Fault(**fault) for fault in json.loads(text)]
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        names = ", ".join(field.name for field in fields(Fault))
        raise InputError(f"GRUPPO_FAULTS={text!r} must be a JSON list of objects with {names}: {error}") from None


def reach(site: str, step: int) -> None:
    """Strike with the faults planned for this site of this step.

    >>> PLAN.append(Fault("sample", 2, "raise"))
    >>> reach("sample", 1)
    >>> reach("sample", 2)
    Traceback (most recent call last):
    RuntimeError: fault planned at sample of step 2
    >>> reach("sample", 2)
    """
    for fault in [fault for fault in PLAN if (fault.site, fault.step) == (site, step)]:
        PLAN.remove(fault)
        fault.strike()


PLAN: list[Fault] = parse(os.environ.get("GRUPPO_FAULTS") or "[]")
"""Faults of this process that are still to come. Each strikes once, those of one site in their order."""
