"""SmolLM2-135M-Instruct, from the package index: what these tests measure on. `make test-real` runs them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="session")
def plain(smollm2_folder: str) -> PreTrainedModel:
    """The model as transformers has it, in float32."""
    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
