"""`save_model` and `push_to_hub`: what they write, where, and what they refuse before they touch anything."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm_process import run_python

from gruppo.errors import InputError
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.trainer import GRPOTrainer

Make = Callable[..., GRPOTrainer]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_is_saved_after_each_step_and_after_the_run(make_trainer: Make, tmp_path: Path) -> None:
    """As TRL's scripts do at their end, with a folder, without one, and with that of the run."""
    kept: list[dict[str, torch.Tensor]] = []

    def keep(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        assert trainer.save_model(tmp_path / "now") == tmp_path / "now"
        kept.append(weights(tmp_path / "now"))

    trainer = make_trainer(steps=2, lr=1e-3, callbacks=[keep])
    trainer.train()
    assert not is_equal(kept[0], kept[1])
    assert is_equal(kept[1], weights(trainer.run.model))
    assert trainer.save_model(str(tmp_path / "after")) == tmp_path / "after"
    assert is_equal(kept[1], weights(tmp_path / "after"))
    assert trainer.save_model() == trainer.save_model(trainer.config.output) == trainer.run.model
    assert not list(tmp_path.glob(".*.tmp-*"))


def test_a_saved_model_samples_what_the_trainer_samples(make_trainer: Make, tmp_path: Path) -> None:
    from gruppo.model import TransformersModel

    trainer = make_trainer(steps=1, lr=1e-2, eval_prompts=8)
    result = trainer.train()
    assert result.after is not None
    folder = trainer.save_model(tmp_path / "saved")
    sampler = TorchSampler(TransformersModel(str(folder)))
    drawn = sampler.draw(trainer.prompts.held_out.prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=4))
    assert [group[0].text for group in drawn] == [rollout.trajectory.text for rollout in result.after.greedy]


def test_a_step_in_the_middle_of_a_run_can_be_the_model_and_the_end_replaces_it(make_trainer: Make) -> None:
    kept: list[dict[str, torch.Tensor]] = []

    def keep(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            kept.append(weights(trainer.save_model()))

    trainer = make_trainer(steps=2, lr=1e-3, callbacks=[keep])
    trainer.train()
    assert not is_equal(kept[0], weights(trainer.run.model))
    trainer.save_model(trainer.run.path.parent / "end")
    assert is_equal(weights(trainer.run.path.parent / "end"), weights(trainer.run.model))


def test_an_adapter_is_saved_as_one(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(steps=1, lora=True, lora_rank=2)
    trainer.train()
    names = {path.name for path in trainer.save_model(tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names


def test_nothing_that_is_not_a_saved_model_is_replaced(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(steps=1)
    trainer.train()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for taken in (tmp_path / "mine", tmp_path, tmp_path / "mine" / "thesis.tex", trainer.run.checkpoints):
        with pytest.raises(InputError, match="exists and is no model that gruppo saved; nothing was touched"):
            trainer.save_model(taken)
    checkpoint = trainer.run.checkpoints / "step-000001"
    with pytest.raises(InputError, match="is no model that gruppo saved"):
        trainer.save_model(checkpoint)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert (checkpoint / "optimizer.json").is_file()


def test_a_save_that_fails_leaves_the_model_before(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(steps=1)
    trainer.train()
    folder = trainer.save_model(tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path: Path) -> None:
        (path / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.model, "write_weights", full)
    with pytest.raises(Exception, match="No space left on device"):
        trainer.save_model(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- the hub --------------------------------------------------------------------------------------------------------


class Hub:
    """The part of the hub's HTTP interface that an upload needs; `files` is what was committed, by its path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.branches: set[str] = set()
        self.tokens: set[str | None] = set()
        self.status = 200
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.tokens.add(self.headers.get("Authorization"))
                self.answer(hub.post(self.path.partition("?")[0], body))

            def do_GET(self) -> None:
                self.answer({"sha": "0" * 40, "siblings": [], "id": "you/name"})

            def answer(self, found: Any) -> None:
                body = json.dumps(found).encode()
                self.send_response(hub.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def post(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.made.append(json.loads(body))
            return {"url": f"{self.address}/you/name"}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        if "/commit/" in path:
            self.branches.add(path.rpartition("/")[2])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.address}/you/name/commit/{'0' * 40}"}
        return {}


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


SCRIPT = """
import sys
from gruppo.errors import GruppoError
from gruppo.trainer import GRPOTrainer, TrainConfig

small = dict(prompts_per_step=2, group_size=2, max_new_tokens=2, steps=1, eval_prompts=0, tensorboard=False, threads=1)
trainer = GRPOTrainer(TrainConfig(output="run", **small), quiet=True)
trainer.train()
try:
    print(trainer.push_to_hub("you/name", private=True, token="hf_secret"))
except GruppoError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


LATE = """
from os import environ
from huggingface_hub import constants
constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = environ["HF_ENDPOINT"], False, True
"""
"""For a process that has imported the client already: what this would have read from the environment."""


def environment_of(folder: Path) -> dict[str, str]:
    every = {"HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return os.environ | every | {"NO_PROXY": "*", "no_proxy": "*"}


def pushed(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    every = environment_of(folder) | environment
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, cwd=folder, env=every, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_the_saved_model_is_uploaded_by_the_hubs_own_client(hub: Hub, tmp_path: Path) -> None:
    environment = environment_of(tmp_path) | {"HF_ENDPOINT": hub.address}
    done = run_python(["-c", LATE + SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.address}/you/name"
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= hub.files.keys()
    (made,) = hub.made
    is_private = made.get("visibility") == "private" or made.get("private")  # newer and older clients
    assert (made["name"], made["organization"], is_private) == ("name", "you", True)
    assert (hub.tokens, hub.branches) == ({"Bearer hf_secret"}, {"main"})


@pytest.mark.long
@pytest.mark.parametrize("why", ["HF_HUB_OFFLINE", "nobody listens", "forbidden"])
def test_an_upload_that_cannot_be_says_where_the_model_is(why: str, hub: Hub, tmp_path: Path) -> None:
    hub.status = 403 if why == "forbidden" else 200
    address = "http://127.0.0.1:9" if why == "nobody listens" else hub.address
    done = pushed(tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1" if why == "HF_HUB_OFFLINE" else "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "GruppoError: you/name cannot be uploaded: " in done.stderr
    assert {"HF_HUB_OFFLINE": "offline mode", "nobody listens": "refused", "forbidden": "403"}[why] in done.stderr
    assert "The model is safe in run/model; to try again: hf upload you/name run/model" in done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file() and not hub.files


def test_a_push_that_cannot_be_meant_is_refused_before_anything(make_trainer: Make) -> None:
    trainer = make_trainer(steps=1)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {"dataset_name": "gsm8k"}, r"no argument 'dataset_name': it uploads the model and writes no model card"),
        ((), {}, r'needs the name of the repository: trainer.push_to_hub\("you/name"\)'),
        (("End of training",), {}, r"repo_id='End of training' names no repository"),
    ]
    for given, more, text in cases:
        with pytest.raises(InputError, match=text):
            trainer.push_to_hub(*given, **more)
    assert not trainer.run.model.exists()
