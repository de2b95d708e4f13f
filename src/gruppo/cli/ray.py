"""`--ray`: the flags of a run on a Ray cluster, and what cannot go with them."""

import os
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gruppo.cli.arguments import Arguments, Word
from gruppo.errors import InputError, require

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # lines of two ranks that are alike
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a node that is taken away is a node that is lost
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what is printed goes to standard output, not to a logger
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Environment of Ray, as it must be when Ray is imported."""


class RayOptions(Arguments):
    """Flags of a run on a Ray cluster: the number of ranks and samplers."""

    ray: Annotated[str | None, Word("auto|HOST:PORT")] = None
    """Run on a Ray cluster; auto starts one on this machine where none runs."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """With --ray: processes that share the model."""
    samplers: Annotated[int, Field(ge=0)] = 0
    """With --ray: vLLM servers, for a run with sampler vllm:start. 0: the first rank samples, or starts the server."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """With --ray: how often the ranks may start again after one of them is lost."""

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
    if options.samplers and config.sampler != "vllm:start":
        raise InputError(
            f"--samplers {options.samplers} are vLLM servers, and the run has sampler={config.sampler!r}; give "
            "--sampler vllm:start, or leave --samplers out"
        )


def launch(options: RayOptions, config: Any, run: Callable[..., int]) -> int:
    """Call `run` on each rank of the cluster; the exit code of the first."""
    check_together(options, config)
    os.environ.update(SETTINGS | os.environ)
    try:
        from gruppo.cli.cluster import train_on
    except ImportError as error:
        raise require("ray", "ray", f"--ray {options.ray}") from error
    return train_on(options, config, run)
