"""SmolLM2-135M-Instruct, from the package index: what these tests measure on. `make test-real` runs them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gruppo.errors import InputError
from gruppo.weights.gguf import folder_of
from gruppo.weights.smollm2 import smollm2

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    try:
        return smollm2(print)
    except InputError as error:
        if "could not be fetched" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def folder(gguf_file: Path) -> str:
    return str(folder_of(gguf_file))


@pytest.fixture(scope="session")
def tokenizer(folder: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def plain(folder: str) -> PreTrainedModel:
    """The model as transformers has it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
