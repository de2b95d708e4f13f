"""`gruppo convert`: the configuration of another trainer as a config file."""

from collections.abc import Sequence

from gruppo.errors import InputError

CONVERT_HELP = """Print the configuration of another trainer as a config file of gruppo. Comments say what maps exactly,
what differs in the maths, what has no counterpart, and what is left to you. Nothing of the source is executed.

  gruppo convert trl config.yaml --num_processes 8 > run.yaml
  gruppo convert trl accelerate launch --num_processes 8 train.py --num_generations 8 --beta 0.04
  gruppo convert open_instruct scripts/train/qwen/grpo.sh
  gruppo convert open_instruct --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 16 --beta 0
  gruppo convert twinkle train_grpo.py

A YAML or shell file may be followed by further flags of its own trainer, which win over the file.
"""


def convert(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(CONVERT_HELP, end="")
        raise SystemExit(0)
    from gruppo.convert import PEERS
    from gruppo.convert import convert as converted
    from gruppo.trainer.build import build_advantage, build_loss
    from gruppo.trainer.config import TrainConfig

    peer = arguments[0].replace("-", "_")
    if peer not in PEERS:
        raise InputError(f"{arguments[0]!r} cannot be converted; there are {', '.join(PEERS)}")
    made = converted(peer, arguments[1:])
    config = TrainConfig.read(made.values, where="the converted options")
    build_loss(config)
    build_advantage(config)
    print(made.text(), end="")
    return 0
