"""Requests by hand: what they draw is decided by their own numbers, whatever they are submitted with."""

from dataclasses import replace

import pytest
from tiny_models import actor

from gruppo.sampler import SampleRequest, SamplingParams, TorchSampler
from gruppo.sampler.torch_sampler import Way
from gruppo.types import Prompt

PARAMS = SamplingParams(max_new_tokens=8, temperature=1.3)
# Other seeds, steps, prompts and counts; the last two overlap in one sample.
REQUESTS = [
    SampleRequest(prompt=Prompt(token_ids=(5, 9, 4)), num_samples=3, seed=1, step=0, number=0),
    SampleRequest(prompt=Prompt(token_ids=(5, 9, 4)), num_samples=1, seed=1, step=7, number=0),
    SampleRequest(prompt=Prompt(token_ids=(12,)), num_samples=5, seed=2, step=0, number=41),
    SampleRequest(prompt=Prompt(token_ids=(12,)), num_samples=2, seed=2, step=0, number=41, first=4),
]


@pytest.fixture
def sampler() -> TorchSampler:
    return TorchSampler(actor("llama"))


@pytest.mark.parametrize("way", ["together", "by length", "recomputed"])
def test_requests_of_several_steps_and_sizes_draw_what_they_draw_alone(sampler: TorchSampler, way: Way) -> None:
    sampler.way = way
    together = [future.result(timeout=0) for future in sampler.submit(REQUESTS, PARAMS)]
    assert [len(drawn) for drawn in together] == [3, 1, 5, 2]
    alone = [sampler.submit([request], PARAMS)[0].result(timeout=0) for request in REQUESTS]
    tokens = [[t.tokens for t in drawn] for drawn in together]
    assert tokens == [[t.tokens for t in drawn] for drawn in alone]
    assert tokens[2][4] == tokens[3][0]
    assert len({t for group in tokens for t in group}) == 10


def test_sample_submits_the_seed_and_step_of_its_params(sampler: TorchSampler) -> None:
    params = replace(PARAMS, seed=3, step=5)
    prompts = [(5, 9, 4), Prompt(token_ids=(12,), index=41)]
    expected = [
        SampleRequest(prompt=Prompt(token_ids=(5, 9, 4)), num_samples=2, seed=3, step=5, number=0),
        SampleRequest(prompt=prompts[1], num_samples=2, seed=3, step=5, number=41),
    ]
    assert sampler.requests(prompts, 2, params) == expected
    futures = sampler.submit(expected, PARAMS)  # the params' own seed and step are another
    assert sampler.draw(prompts, 2, params) == [f.result(timeout=0) for f in futures]


def test_no_requests_run_no_forward(sampler: TorchSampler) -> None:
    def refuse() -> None:
        raise AssertionError

    assert TorchSampler(sampler.model, poll=refuse).submit([], PARAMS) == []
