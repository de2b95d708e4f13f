"""Tests with the real engine. Without vLLM they are skipped: `make test-vllm` has an environment for them."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import options

from gruppo.sampler.vllm.engine import platform_settings
from gruppo.sampler.vllm.inprocess import SETTINGS
from gruppo.trainer import GRPOTrainer, TrainConfig

HERE = Path(__file__).parent
FOUND = importlib.util.find_spec("vllm")
IS_INSTALLED = FOUND is not None and FOUND.origin is not None  # this folder itself is no vLLM
# vLLM 0.32 looks at every name of torch.distributed when an engine starts, also at one that is going away (twice).
IGNORED = r"ignore:`torch\.distributed\.reduce_op` is deprecated:FutureWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.filterwarnings(IGNORED))
            if not IS_INSTALLED:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; `make test-vllm` installs it"))


@pytest.fixture(scope="session", autouse=True)
def _vllm_imported() -> None:
    """Import it once, with torch's warnings about itself, under the settings that the first engine would make."""
    os.environ.update(SETTINGS | platform_settings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm

        assert vllm.LLM  # vLLM imports its parts when they are named


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., GRPOTrainer]]:
    """Trainers of short runs; they end with the module."""
    made: list[GRPOTrainer] = []

    def make(**changes: Any) -> GRPOTrainer:
        output = tmp_path_factory.mktemp("runs") / "run"
        made.append(GRPOTrainer(TrainConfig(**options(output, **changes)), quiet=True))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
