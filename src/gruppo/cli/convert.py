"""`gruppo convert`: the configuration of another trainer as a config file."""

from collections.abc import Sequence
from typing import Annotated, Literal

from gruppo.cli.options import Arguments, Word, parse


class ConvertArguments(Arguments):
    """Print the configuration of another trainer as a config file. Comments say what maps exactly, what differs in the
    maths, what has no counterpart, and what is left to set. Nothing of the source is executed.

    gruppo convert trl config.yaml --num_processes 8 > from_trl.yaml
    gruppo convert trl accelerate launch --num_processes 8 train.py --num_generations 8 --beta 0.04
    gruppo convert open_instruct scripts/train/qwen/grpo.sh
    gruppo convert twinkle train_grpo.py
    """

    peer: Annotated[Literal["trl", "open_instruct", "twinkle"], Word("PEER", is_positional=True)]
    """Whose configuration it is."""
    source: Annotated[tuple[str, ...], Word("SOURCE", is_positional=True)] = ()
    """A .yaml, .sh or .py file and further flags of that trainer, which win over the file; or a command line alone."""


def convert(arguments: Sequence[str]) -> int:
    # After --, flags of the other trainer are words like any other.
    given = parse(ConvertArguments, [*arguments[:1], *(["--", *arguments[1:]] if arguments[1:] else [])], "convert")
    from gruppo.convert import convert as converted
    from gruppo.trainer.build import build_advantage, build_loss
    from gruppo.trainer.config import TrainConfig

    made = converted(given.peer, given.source)
    config = TrainConfig.read(made.values, where="the converted options")
    build_loss(config)
    build_advantage(config)
    print(made.text(), end="")
    return 0
