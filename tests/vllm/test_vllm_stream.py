"""Streaming with a real vLLM server: weights change while groups are in flight, and their versions tell it."""

import copy
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import logps_by_transformers, options, update

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, vLLMSampler
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import Trajectory
from gruppo.weights import WeightStore
from gruppo.weights.source import load_tokenizer


def long_winded(folder: Path, *, less_likely: float = 0.2) -> str:
    """An untrained model over the embedded tokenizer. One token in 70 is the last, so lengths have a long tail."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer("builtin")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=512))
    with torch.no_grad():  # a constant in all tokens makes the end token less likely
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -less_likely
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even tokens: a reward that moves the weights and leaves the lengths alone."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def test_every_logp_is_that_of_a_policy_within_the_versions_and_none_is_older_than_the_bound(tmp_path: Path) -> None:
    small = options(tmp_path / "run", sampler="vllm:start", max_staleness=3, streaming=True, steps=8, lr=3e-3)
    small |= {"model": long_winded(tmp_path / "model"), "max_new_tokens": 256, "temperature": 1.0}
    small |= {"data": "builtin:carries", "eval_prompts": 4, "eval_every": 4}
    models: dict[int, Any] = {}
    trained: dict[int, list[Any]] = {}

    def keep(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        models[step] = copy.deepcopy(trainer.model.model)
        trained[step] = [r.trajectory for g in trainer.kept for r in g.rollouts]

    trainer = GRPOTrainer(TrainConfig(**small), rewards=[even_tokens], callbacks=[keep], quiet=True)
    models[0] = copy.deepcopy(trainer.model.model)
    trainer.train()
    assert [len(trained[step]) for step in range(1, 9)] == [8 * 4] * 8
    ages = {step: step - 1 - min(t.versions[0] for t in trained[step]) for step in trained}
    assert max(ages.values()) <= 3
    rows = {row["step"]: row for row in trainer.run.metrics()}
    assert {step: rows[step]["rollout/staleness"] for step in ages} == ages
    for t in (t for step in trained for t in trained[step][::4]):
        writers_of(t, models)


def writers_of(trajectory: Trajectory, models: dict[int, Any]) -> list[int]:
    """The version that drew each token, by its log-prob."""
    versions = range(trajectory.versions[0], trajectory.versions[1] + 1)
    by_version = {v: logps_by_transformers(models[v], [trajectory], 1.0)[0] for v in versions}
    writers = []
    for j, logp in enumerate(trajectory.logps or ()):
        gaps = {v: abs(own[j] - logp) for v, own in by_version.items()}
        writers.append(min(gaps, key=lambda v: gaps[v]))
        assert gaps[writers[-1]] < 1e-4, (trajectory.versions, j, gaps)
    return writers


def test_a_completion_in_flight_is_written_by_one_policy_after_the_other(tmp_path: Path) -> None:
    actor = TransformersModel(long_winded(tmp_path / "model", less_likely=20.0), device="cpu")
    # 32 completions of 480 tokens, 4 at a time: seconds, in which some completion is always half written.
    engine = {"servers": ("start",), "max_model_len": 512, "options": {"max_num_seqs": 4}}
    with closing(vLLMSampler(str(tmp_path / "model"), **engine, at_once=2)) as sampler:
        store = WeightStore(tmp_path / "sync", sampler.canary_rows)
        models = {0: copy.deepcopy(actor.model)}
        for attempt in range(1, 6):
            update(actor)  # beforehand: on few cores an update may last as long as all the completions
            models[actor.version] = copy.deepcopy(actor.model)
            published = store.publish(actor)
            params = SamplingParams(max_new_tokens=480, seed=1, step=attempt)
            (future,) = sampler.submit(sampler.requests(["47+85="], 32, params), params)
            time.sleep(0.3 * attempt)  # the first token is drawn; the wait grows, should a machine be slower than that
            sampler.load(published)
            found = future.result(timeout=300)
            writers = [writers_of(t, models) for t in found]
            assert [len(each) for each in writers] == [480] * 32
            assert all(each == sorted(each) for each in writers)
            if {t.versions for t in found} == {(attempt - 1, attempt - 1)}:
                continue  # the weights came after the last of them: the machine is busy
            assert {t.versions for t in found} == {(attempt - 1, attempt)}
            if max(len(set(each)) for each in writers) > 1:
                return
    pytest.fail("no completion was in flight while weights were loaded")


def test_a_server_that_dies_with_groups_in_flight_is_brought_back(tmp_path: Path) -> None:
    small = options(tmp_path / "run", sampler="vllm:start", max_staleness=3, streaming=True, steps=6)
    small |= {"model": long_winded(tmp_path / "model"), "data": "builtin:carries", "max_new_tokens": 256}
    ages: list[int] = []

    def kill(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        ages.extend(step - 1 - r.trajectory.versions[0] for g in trainer.kept for r in g.rollouts)
        if step == 3:
            server = trainer.sampler.supervisors[0].engine.process.process
            os.killpg(server.pid, signal.SIGKILL)

    result = GRPOTrainer(TrainConfig(**small), rewards=[even_tokens], callbacks=[kill], quiet=True).train()
    assert result.status == "done" and result.step == 6
    assert len(ages) == 6 * 8 * 4 and max(ages) <= 3
