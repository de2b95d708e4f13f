"""A run on a Ray cluster: ranks are workers of Ray Train, which starts lost ones again, and vLLM servers are actors."""

import asyncio
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

# An extra; this module is imported with --ray alone.
import ray  # pyright: ignore[reportMissingImports]
from ray.train import (  # pyright: ignore[reportMissingImports]
    ControllerError,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
)

from gruppo.errors import GruppoError, InputError, RankError
from gruppo.process.streams import printable, safe_streams, shell_word
from gruppo.run.signals import StopFlag
from gruppo.sampler.vllm.placed import ServerKeeper

if TYPE_CHECKING:
    from gruppo.cli.ray import RayOptions

NODE_S = 3.0
"""Timeout for connecting to the head of a cluster."""
PLACINGS = 5
"""Attempts of Ray Train to place the ranks, a minute each."""
STORE_BYTES = 200 * 2**20
"""Size of the object store of a cluster that is started here."""


def train_on(options: "RayOptions", config: Any, run: Callable[..., int]) -> int:
    """Call `run` on each rank until it ends on all of them; the exit code of the first."""
    stop, output = StopFlag(), Path(config.output).absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    # Ray Train wants a folder that all nodes see, and tries it.
    with (
        safe_streams(),
        stop.listening(),
        connected(options),
        TemporaryDirectory(dir=output.parent, prefix=".gruppo-ray-") as folder,
    ):
        name = Path(folder).name.removeprefix(".")
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        servers = _place_servers(options.samplers, f"{name}-server", config.vllm_options if has_gpus else None)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        bell = ray.remote(Bell).options(num_cpus=0, scheduling_strategy=here).remote()
        given = {
            "run": run,
            "bell": bell,
            "cwd": os.getcwd(),
            "variables": {"GRUPPO_LAUNCH": name, "GRUPPO_SERVERS": ",".join(servers)},
        }
        trainer = TorchTrainer(
            _rank,
            train_loop_config=given,
            torch_config=TorchConfig(timeout_s=int(config.advanced.rank_deadline)),
            scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=has_gpus),
            run_config=RunConfig(
                name=name,
                storage_path=folder,
                failure_config=FailureConfig(max_failures=options.max_restarts, controller_failure_limit=PLACINGS - 1),
                callbacks=[Losses(options.max_restarts)],
                logging_config=LoggingConfig("ERROR"),
            ),
        )
        with ThreadPoolExecutor(1) as thread:
            fitted, is_told = thread.submit(trainer.fit), False
            while not wait([fitted], timeout=0.2).done:
                if stop.signal is not None and not is_told:
                    bell.ring.remote(stop.signal)
                    is_told = True
        return _code(fitted.result, options, output)


def _code(result: Callable[[], Any], options: "RayOptions", output: Path) -> int:
    """Exit code of a finished run, or the error of one that Ray Train gave up on."""
    try:
        return result().return_value
    except WorkerGroupError as error:
        again = f"--ray {options.ray} --ranks {options.ranks} --samplers {options.samplers}"
        raise RankError(
            f"the ranks were lost, and --max-restarts {options.max_restarts} is used up; look for the cause, then go "
            f"on with: gruppo resume {shell_word(output)} {again}"
        ) from error
    except ControllerError as error:
        found = {name: number for name, number in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise InputError(
            f"the ranks could not be started: {error}; {options.ranks} ranks and {options.samplers} servers take a CPU "
            f"each, and a GPU where there are any, and the cluster has {found}. Add nodes (`ray start`), or lower "
            "--ranks or --samplers"
        ) from error


def _place_servers(number: int, name: str, vllm_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Actors by name that are to keep a vLLM server each, with as many GPUs as it wants; no options: with none."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    gpus = 0 if vllm_options is None else prod(int(vllm_options.get(size, 1)) for size in sizes)
    needs: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": -1}
    needs["scheduling_strategy"] = "SPREAD"  # a node that is lost takes few of them
    keeper, names = ray.remote(ServerKeeper), [f"{name}-{i}" for i in range(number)]
    return {name: keeper.options(name=name, **needs).remote() for name in names}


def _rank(given: dict[str, Any]) -> int:
    """Run a rank in a thread of its worker and return the exit code. An exception makes Ray restart all ranks."""
    os.chdir(given["cwd"])
    os.environ.update(given["variables"])
    try:
        return given["run"](heed=lambda stop: _heed(stop, given["bell"]))
    except GruppoError as error:
        if error.exit_code == RankError.exit_code:
            raise
        print(printable(f"gruppo: {error}"), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:  # a defect: it would come again
        print(printable(traceback.format_exc()), file=sys.stderr, flush=True)
        return 1


class Bell:
    """Actor that tells the first rank about a signal to the command."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self._number = 0

    async def ring(self, number: int) -> None:
        self._number = number
        self._rung.set()

    async def heard(self) -> int:
        """The signal, once there was one."""
        await self._rung.wait()
        return self._number


def _heed(stop: StopFlag, bell: Any) -> None:
    """Have a signal to the command stop the run: the thread of a rank gets none."""
    threading.Thread(target=lambda: stop.share(ray.get(bell.heard.remote())), daemon=True).start()


class Losses(UserCallback):
    """Prints what was lost. Ray Train calls it in a separate process, whose output the command shows."""

    def __init__(self, most: int) -> None:
        self.most, self.number = most, 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.number += 1
        lost = [rank for rank, error in worker_exceptions.items() if not isinstance(error, RankError)]
        what = f"rank {', '.join(map(str, lost))} is lost" if lost else str(next(iter(worker_exceptions.values())))
        if self.number <= self.most:
            print(f"ray: {what}; all ranks start again (restart {self.number} of {self.most})", flush=True)


def _hush() -> None:
    """Keep Ray's remarks about itself out of the output of a process; the loss of a rank is told by `Losses`."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _check_address(address: str) -> None:
    """Refuse `host:port` where nothing listens: Ray would try it for many minutes."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        socket.create_connection((host, int(port)), timeout=NODE_S).close()


@contextmanager
def connected(options: "RayOptions") -> Iterator[None]:
    """Connect to the cluster; one that was started here is stopped on exit."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    usual: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR}
    variables |= {"TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5"}
    # A worker that ends would kill the guard of a vLLM server, and leave the server.
    variables |= {"RAY_kill_child_processes_on_worker_exit": "0"}
    usual["runtime_env"] = {"env_vars": variables, "worker_process_setup_hook": _hush}
    assert options.ray is not None
    try:
        _check_address(options.ray)
        ray.init(address=options.ray, **usual)
    except (OSError, ValueError) as error:
        if options.ray == "auto" and not isinstance(error, ConnectionError):
            raise
        if options.ray != "auto":
            raise InputError(
                f"--ray {options.ray}: no cluster answers there ({str(error)[:200]}); give the address that `ray "
                "start` prints, or auto"
            ) from error
        # CPUs here are places for actors; a machine with few cores may run more ranks than it has of them.
        places = max(os.cpu_count() or 1, options.ranks + options.samplers)
        ray.init(num_cpus=places, object_store_memory=STORE_BYTES, **usual)
    try:
        yield
    finally:
        ray.shutdown()
