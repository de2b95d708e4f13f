"""`--ray`: the flags of a run on a Ray cluster, and what cannot go with them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gruppo.cli.options import Arguments, Word
from gruppo.errors import InputError, Terminated, require
from gruppo.output import shell_word, unhindered
from gruppo.run.signals import STOPPED, Interrupted, StopFlag


class RayOptions(Arguments):
    """Flags of a run on a Ray cluster: what is placed there."""

    ray: Annotated[str | None, Word("auto|HOST:PORT")] = None
    """Run on a Ray cluster; auto starts one on this machine where none runs."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """With --ray: processes that share the model."""
    samplers: Annotated[int, Field(ge=0)] = 0
    """With --ray: processes that sample. 0: the first rank samples."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """With --ray: ranks, samplers and nodes that may be lost, all together."""

    @model_validator(mode="after")
    def _check_ray(self) -> Self:
        given = sorted(self.model_fields_set & RayOptions.model_fields.keys())
        if self.ray is None and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ValueError(f"{flag} is for a run on a Ray cluster; add --ray auto, or leave it out")
        if "://" in (self.ray or ""):
            raise ValueError(
                f"--ray {self.ray}: the command runs on a machine of the cluster; give auto, or HOST:PORT of the "
                "head as `ray start` prints it"
            )
        return self


def check_together(options: RayOptions, config: Any) -> None:
    """Refuse what a run on Ray cannot do."""
    given = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    if given:
        raise InputError(
            f"--ray starts the ranks itself, and {given[0]}={os.environ[given[0]]} says that torchrun or another "
            "launcher has started this process; use one of them"
        )
    if not options.samplers:
        return
    if config.sampler != "torch":
        raise InputError(
            f"--samplers {options.samplers} are copies of sampler=torch, and the run has sampler={config.sampler!r}; "
            "start vLLM servers where you want them, name them in --sampler vllm:http://host:8000,..., and leave "
            "--samplers out"
        )
    for name, usual in {"streaming": False, "quantize": None}.items():
        if getattr(config, name) != usual:
            raise InputError(
                f"{name}={getattr(config, name)!r} samples from weights that are in the trainer's process only; leave "
                "--samplers out, or the option"
            )


def launch(options: RayOptions, words: Sequence[str], config: Any) -> int:
    """Run `gruppo` with these words on the cluster; the exit code."""
    check_together(options, config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from gruppo.cli.cluster import ClusterRun, connected
    except ImportError as error:
        raise require("ray", "ray", f"--ray {options.ray}") from error
    stop = StopFlag()
    with unhindered(), connected(options) as gcs, stop.listening():
        run = ClusterRun(options, words, Path(config.output), stop, gcs)
        try:
            return run.run()
        except Interrupted:
            if run.newest_step() is None:
                raise Terminated from None
            print(f"stopped after step {run.newest_step()}; go on with: gruppo resume {shell_word(config.output)}")
            return STOPPED
        finally:
            run.close()
