"""What all tests share: one thread and fixed hypothesis examples, so that two runs of the suite are the same run."""

import os

import torch
from fault_matrix import (  # noqa: F401  # hooks
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
)
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

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
