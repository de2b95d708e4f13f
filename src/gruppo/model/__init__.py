"""The actor: a transformers model that scores tokens and takes steps.

A different backend (a sharded model, another library) is another class with the same methods.
"""

from gruppo.errors import require_train

require_train("gruppo.model", "transformers")

from gruppo.model.lora import LoraSpec  # noqa: E402
from gruppo.model.transformers_model import TransformersModel  # noqa: E402

__all__ = ["LoraSpec", "TransformersModel"]
