"""The loop: prompts in, a better model out.

What a run records is in `gruppo.run`. Nothing imports the trainer but the command line.
"""

from typing import TYPE_CHECKING, Any

from gruppo.errors import require_train

require_train("gruppo.trainer", "pydantic")

from gruppo.peer_names import CLASSES  # noqa: E402
from gruppo.trainer.callbacks import Callback  # noqa: E402
from gruppo.trainer.config import TrainConfig  # noqa: E402

if TYPE_CHECKING:
    from gruppo.trainer.trainer import GRPOTrainer

__all__ = ["Callback", "GRPOTrainer", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":  # brings torch; a config can be read without it
        from gruppo.trainer.trainer import GRPOTrainer

        return GRPOTrainer
    if name in CLASSES:
        raise ImportError(f"gruppo has no {name}: {CLASSES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
