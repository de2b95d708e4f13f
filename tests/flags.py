"""The config that the flags of `gruppo train` make."""

from collections.abc import Sequence
from typing import Any

from gruppo.cli.arguments import parse_options, run_config
from gruppo.cli.train import TrainArguments
from gruppo.trainer import TrainConfig


def config_of(words: Sequence[str], preset: dict[str, Any] | None = None) -> TrainConfig:
    given, flags = parse_options(TrainArguments, words, "train")
    return run_config(given, flags, "train", preset)
