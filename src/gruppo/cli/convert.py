"""`gruppo convert`: the configuration of another trainer as a config file."""

from collections.abc import Sequence
from typing import Annotated, Literal

from gruppo.cli.arguments import Arguments, Word, parse
from gruppo.convert import convert as converted
from gruppo.trainer.config import TrainConfig


class ConvertArguments(Arguments):
    """Print the configuration of another trainer as a config file of gruppo.

    It begins with what you must set yourself and what is left out, with the reasons. A comment on each option says what
    it comes from, and how it differs. Defaults of the other trainer are written out where gruppo has others.

    The source is a YAML or JSON file, or a command line: put `gruppo convert trl` before the command in your shell
    script, and the shell fills in its variables. Flags win over the file. A Python script is not read: give the options
    that it sets as flags.

    gruppo convert trl config.yaml --num_processes 8 > run.yaml
    gruppo convert trl accelerate launch --num_processes 8 train.py --num_generations 8 --beta 0.04 > run.yaml
    gruppo convert open_instruct python grpo_fast.py --num_unique_prompts_rollout 64 --async_steps 4 > run.yaml
    """

    peer: Annotated[Literal["trl", "open_instruct", "twinkle"], Word("PEER", is_positional=True)]
    """Whose configuration it is."""
    source: Annotated[tuple[str, ...], Word("SOURCE", is_positional=True)] = ()
    """A .yaml or .json file, flags of that trainer, or the command that starts it."""


def convert(arguments: Sequence[str]) -> int:
    # After --, flags of the other trainer are words like any other.
    given = parse(ConvertArguments, [*arguments[:1], *(["--", *arguments[1:]] if arguments[1:] else [])], "convert")
    made = converted(given.peer, given.source)
    # clip_range brings torch; `gruppo train` checks it.
    checked = {name: value for name, value in made.values.items() if name != "clip_range"}
    TrainConfig.read(checked, where="the converted options")
    print(made.text(), end="")
    return 0
