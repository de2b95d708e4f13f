"""From the names of servers to engines that are on their way: inside the process, ours, or somebody else's."""

from collections.abc import Iterator, Sequence
from typing import Any

from gruppo.errors import InputError
from gruppo.model.lora import LoraSpec
from gruppo.sampler.engine import Engine, Poll
from gruppo.weights import source


def start_engines(servers: Sequence[str], own: dict[str, Any], *, poll: Poll) -> Iterator[Engine]:
    """The engines one by one, each started; `own` is for those that are ours."""
    if not servers:
        from gruppo.sampler.vllm_inside import InsideEngine

        yield InsideEngine(**own, poll=poll)
    from gruppo.sampler.vllm_launch import ServerProcess
    from gruppo.sampler.vllm_server import ServerEngine

    for address in servers:
        if address == "start":
            process = ServerProcess(**own)
            yield ServerEngine(process.address, process=process, poll=poll)
        elif own["options"]:
            raise InputError(f"options {sorted(own['options'])} are for an engine started here, not for {address}")
        else:
            yield ServerEngine(address, poll=poll)


def adapter_options(model_id: str, lora: LoraSpec | None) -> dict[str, Any]:
    """What an engine must know beforehand of the adapter that will come."""
    if lora is None:
        return {}
    targets = source.linear_layers(model_id) if lora.targets == "all-linear" else lora.targets
    # vLLM goes by the last part of a name; PEFT also knows layers by their whole one.
    names = {name.rpartition(".")[2] for name in ([targets] if isinstance(targets, str) else targets)}
    return {"lora_rank": lora.rank, "lora_targets": tuple(sorted(names))}
