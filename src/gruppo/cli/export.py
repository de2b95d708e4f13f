"""`gruppo export`: a trained model as other tools load it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gruppo.cli.options import parse
from gruppo.errors import InputError


@dataclass
class ExportArguments:
    source: tyro.conf.Positional[Path]
    """A run directory, or a model folder."""
    output: tyro.conf.Positional[Path]
    """New folder to write."""
    merge: bool = False
    """Fold a LoRA adapter into the weights of its base."""


def export(arguments: Sequence[str]) -> int:
    given = parse(
        ExportArguments,
        arguments,
        verb="export",
        description="Copy a run's model into a folder of its own, for transformers, PEFT and vLLM.\n\n"
        "  gruppo export runs/demo my-model\n  gruppo export runs/lora my-merged-model --merge",
    )
    folder = given.source / "model" if (given.source / "model").is_dir() else given.source
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise InputError(f"{given.source} holds no model: no model/, config.json or adapter_config.json in it")
    if given.merge and not is_adapter:
        raise InputError(f"{folder} holds no adapter to merge; leave out --merge")
    from gruppo.model import TransformersModel
    from gruppo.model.checkpoint import save_pretrained

    model = TransformersModel(str(folder), device="cpu")
    inner = model.model.merge_and_unload() if given.merge else model.model  # type: ignore[operator]  # PEFT's
    save_pretrained(inner, model.tokenizer, given.output)
    print(f"{given.output} holds the {'merged model' if given.merge else 'adapter' if is_adapter else 'model'}")
    return 0
