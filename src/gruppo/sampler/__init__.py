"""Rollouts: prompts become groups of sampled trajectories.

    base.py           Sampler: the base class, with `sample` on top of `submit`
    params.py         SamplingParams: temperature, filters, limits, stops
    torch_sampler.py  TorchSampler: decoding of a transformers model in this process
    decoding.py       rows that grow by a token: with a cache, or computed anew where a cache gives other log-probs
    vllm/             vLLMSampler: rollouts from vLLM, in this process or behind HTTP

A sampler returns the tokens it drew and their log-probs under the sampling policy; they are never re-tokenised or
recomputed. Nothing here imports the model, the losses or the metrics. Another engine is another subclass of Sampler.
"""

from gruppo.sampler.base import Sampler, SampleRequest
from gruppo.sampler.params import SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler
from gruppo.sampler.vllm.sampler import vLLMSampler

__all__ = ["SampleRequest", "Sampler", "SamplingParams", "TorchSampler", "vLLMSampler"]
