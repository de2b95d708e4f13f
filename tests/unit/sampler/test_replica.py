"""Replicas without a cluster: what one answers is what a sampler in the trainer's process draws."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.errors import CheckpointError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.sampler.replica import COLUMNS, Replica
from gruppo.weights import WeightStore
from gruppo.weights.canary import canary_rows

PROMPTS = ["47+85=", "1+2=", "90+10="]


def changed(model: TransformersModel, version: int) -> TransformersModel:
    """The model after an update of all that trains."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.version = version
    return model


def message(published: Any, sampler: TorchSampler, params: SamplingParams, lora: LoraSpec | None) -> bytes:
    requests = sampler.requests(PROMPTS, 4, params)
    facts = [
        {n: getattr(r, n) for n in ("num_samples", "seed", "step", "number", "first")} | {"ids": r.prompt.token_ids}
        for r in requests
    ]
    given = {"model": "builtin", "dtype": "float32", "lora": None if lora is None else asdict(lora), "threads": 1}
    given |= {"cwd": str(Path.cwd()), "version": published.version, "folder": str(published.folder)}
    given |= {"rows": published.canary.rows, "params": asdict(params), "requests": facts}
    return json.dumps(given).encode()


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_a_replica_draws_what_the_trainers_process_would(lora: LoraSpec | None, tmp_path: Path) -> None:
    model = TransformersModel("builtin", lora=lora)
    sampler, replica = TorchSampler(model), Replica()
    store = WeightStore(tmp_path / "sync", canary_rows(len(model.tokenizer)))
    seen = []
    for version in (1, 2):
        published = store.publish(changed(model, version))
        params = SamplingParams(max_new_tokens=6, seed=3, step=version, stop=("9",))
        words = message(published, sampler, params, lora)
        answer = json.loads(replica.sample(words))
        assert answer["canary"] == list(published.canary.logps) == replica.load(words)
        expected = [[{n: getattr(t, n) for n in COLUMNS} for t in group] for group in sampler.draw(PROMPTS, 4, params)]
        assert answer["samples"] == json.loads(json.dumps(expected))
        assert answer["samples"][0][0]["versions"] == [version, version]
        assert json.loads(Replica().sample(words)) == answer  # one that has just been started
        seen.append(answer["canary"])
    assert seen[0] != seen[1]


def test_weights_that_do_not_fit_are_refused_and_read_again(tmp_path: Path) -> None:
    model = TransformersModel("builtin")
    sampler, replica = TorchSampler(model), Replica()
    published = WeightStore(tmp_path / "sync", canary_rows(len(model.tokenizer))).publish(changed(model, 1))
    words = message(published, sampler, SamplingParams(max_new_tokens=3, step=1), None)
    hidden = published.folder.rename(tmp_path / "hidden")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="does not fit the model: missing"):
            replica.sample(words)
    hidden.rename(published.folder)
    assert json.loads(replica.sample(words))["canary"] == list(published.canary.logps)
