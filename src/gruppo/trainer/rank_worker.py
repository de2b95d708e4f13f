"""Rank worker: a rank other than the first, which holds its shard of the model and does what the first rank calls."""

import faulthandler

import torch

from gruppo.model.ranked import GRACE_S
from gruppo.parallel.ranks import Ranks
from gruppo.run.signals import StopFlag
from gruppo.trainer import build
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.inputs import resolve_inputs


def follow(ranks: Ranks) -> int:
    """Take part in the run of the first rank until it ends; its exit code."""
    message, _ = ranks.receive()
    if message["call"] == "end":  # it could not begin
        return int(message["code"])
    config, inputs = resolve_inputs(TrainConfig.read(message["config"]))
    if config.threads:
        torch.set_num_threads(config.threads)
    # The first rank waits no longer than this for the others. A signal ends a rank that has nothing to save yet.
    faulthandler.dump_traceback_later(config.advanced.rank_deadline + GRACE_S, exit=True)
    stop = StopFlag()
    model = build.build_ranked(config, inputs, build.build_loss(config, inputs.loss), None, ranks, stop.share)
    faulthandler.cancel_dump_traceback_later()
    with stop.listening():
        return model.follow()
