"""gruppo: group-relative policy optimization of language models.

The pipeline is the tree; each stage is a package that can be used alone:

    prompts       gruppo.task        rows of a file become tokenised prompts
    rollouts      gruppo.sampler     prompts become groups of sampled sequences
    rewards       gruppo.reward      sequences become numbers, in processes that can be killed
    advantages    gruppo.advantage   numbers become credit within a group
    packed batch  gruppo.batch       sequences become flat tensors; the one shift by one is here
    log-probs     gruppo.kernel, gruppo.model
    loss          gruppo.loss        level, surrogate, weights, terms, aggregation
    step          gruppo.model
    metrics       gruppo.metric
    all of it     gruppo.trainer, gruppo.cli

Importing this package imports nothing heavy: `gruppo.loss` and the other subpackages load when they are first used.
`gruppo.loss`, `.advantage`, `.metric`, `.batch` and `.kernel` need torch and nothing else; `.model`, `.sampler`,
`.trainer` and the command line need the extra `train`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in (
        "GRPOTrainer",
        "TrainConfig",
        "GRPOConfig",
        "RLOOConfig",
        "RLOOTrainer",
        "FastLanguageModel",
        "ModelConfig",
        "ScriptArguments",
        "TrlParser",
        "get_peft_config",
        "get_quantization_config",
        "get_kbit_device_map",
    ):  # where users of other trainers look for them
        return getattr(import_module("gruppo.trainer"), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
