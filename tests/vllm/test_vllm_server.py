"""A server of somebody else's: runs through it are the runs inside the process, whatever happens to it."""

import http.client
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import PROMPTS, PortServer, completions, largest_gap, update

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, vLLMSampler
from gruppo.sampler.vllm.engine import engine_arguments
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.trainer import GRPOTrainer
from gruppo.weights.source import resolve

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=4, seed=3, step=2)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = PortServer(engine_arguments(model=resolve("builtin"), dtype="float32", max_model_len=24))
    HttpEngine(process.address, process=process).wait_until_ready()
    yield process
    process.close()


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    made = TransformersModel("builtin", device="cpu")
    update(made, 10)
    return made


@pytest.fixture
def sampler(server: ServerProcess, model: TransformersModel) -> Iterator[vLLMSampler]:
    made = vLLMSampler("builtin", servers=(server.address,), max_model_len=24)
    made.sync(model)
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_reported_logps_are_those_of_transformers_after_ten_updates(
    temperature: float, sampler: vLLMSampler, model: TransformersModel
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=4)
    responses = sampler.sample(PROMPTS, 8, params)
    assert largest_gap(model.model, responses, temperature) < 1e-4
    assert largest_gap(model.model, responses, 1.7 - temperature) > 1e-2
    greedy = sampler.sample(PROMPTS, 2, SamplingParams(temperature=0.0, max_new_tokens=4))
    assert all(a == b for a, b in (r.sequences for r in greedy))


def test_two_clients_share_a_batch_and_give_what_one_gives(
    server: ServerProcess, sampler: vLLMSampler, model: TransformersModel
) -> None:
    addresses = (server.address, server.address.replace("127.0.0.1", "localhost"))
    two = vLLMSampler("builtin", servers=addresses, max_model_len=24)
    two.sync(model)
    assert two.sample(PROMPTS, 4, PARAMS) == sampler.sample(PROMPTS, 4, PARAMS)
    two.close()


@pytest.mark.row("R-38", "vLLM with the weights of its start")
def test_a_server_with_the_weights_of_its_start_is_noticed_after_the_batch(
    sampler: vLLMSampler, model: TransformersModel, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = sampler.sample(PROMPTS, 4, PARAMS)
    engine = sampler.supervisors[0].engine
    engine.load_weights(Path(resolve("builtin")))  # what a restart would leave, without its minute
    assert sampler.sample(PROMPTS, 4, PARAMS) == undisturbed
    assert ["no longer has the weights it was given" in record.message for record in caplog.records] == [True]
    assert largest_gap(model.model, undisturbed, 0.7) < 1e-4


def test_a_method_that_a_worker_does_not_have_is_told_from_one_that_fails(sampler: vLLMSampler) -> None:
    """A server without our extension says so in words of its own, which a new vLLM may change."""
    engine = sampler.supervisors[0].engine
    assert isinstance(engine, HttpEngine)
    received = engine._receipt("gruppo_count", Path(resolve("builtin")))
    assert received is not None and received["tensors"] == 25
    assert engine._receipt("gruppo_something_newer", Path(resolve("builtin"))) is None
    assert not engine.gives_receipts


def product(run: Path) -> dict[str, bytes]:
    """Every file that must be the same in two runs: what was sampled, what was measured."""
    files = [*(run / "completions").iterdir(), run / "metrics.jsonl"]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def undisturbed(trainers: Callable[..., GRPOTrainer]) -> Path:
    """A run with the engine inside the process."""
    trainer = trainers(sampler="vllm")
    trainer.train()
    return trainer.run.path


@pytest.mark.row("R-36", "SIGKILL of vllm serve in a request")
def test_a_server_that_is_killed_in_the_middle_of_a_request_and_comes_back_changes_no_byte_of_a_run(
    server: ServerProcess,
    trainers: Callable[..., GRPOTrainer],
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainers(sampler=f"vllm:{server.address}")
    killed, send = threading.Event(), http.client.HTTPConnection.request

    def send_and_kill(connection: Any, verb: str, path: str, body: Any, *rest: Any) -> None:
        send(connection, verb, path, body, *rest)
        is_sampling = path == "/v1/completions" and "prompt_logprobs" not in body
        if is_sampling and trainer.step_number == 3 and not killed.is_set():
            killed.set()
            assert server.process is not None
            os.killpg(server.process.pid, signal.SIGKILL)
            threading.Thread(target=server.start).start()  # as whoever runs it would

    monkeypatch.setattr(http.client.HTTPConnection, "request", send_and_kill)
    trainer.train()
    assert killed.is_set()
    assert ["cannot be reached" in r.message for r in caplog.records if "bringing it back" in r.message] == [True]
    assert product(trainer.run.path) == product(undisturbed)
    assert [len(rows) for rows in completions(undisturbed).values()] == [32] * 6
