"""Rollouts: prompts become groups of sampled sequences.

    base.py           Sampler: the base class, with `sample` on top of `submit`
    params.py         SamplingParams: temperature, filters, limits, stops
    randomness.py     uniforms that are a function of (seed, step, prompt, sample, position)
    torch_sampler.py  TorchSampler: decoding of a transformers model in this process
    decoding.py       rows that grow by a token: with a cache, or computed anew where a cache gives other log-probs
    vllm_sampler.py   vLLMSampler: rollouts from vLLM, hand-over of weights, recovery
    engine.py         what it asks of an engine
    start.py          from names of servers to engines
    answer.py         what an engine answered, checked
    vllm_inside.py    an engine in this process
    vllm_server.py    an engine behind HTTP
    vllm_launch.py    a server of our own
    vllm_guard.py     ends it when we are gone
    vllm_worker.py    what we add to vLLM's worker: loading with a receipt
    handover.py       weights in a folder, and what is in it
    proof.py          the canary: do both sides score fixed tokens alike?

A sampler returns the tokens it drew and their log-probs under the sampling policy; nobody re-tokenises or recomputes
them. Another engine is another subclass of Sampler.
"""

from gruppo.sampler.base import Sampler, SampleRequest
from gruppo.sampler.params import SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler
from gruppo.sampler.vllm.sampler import vLLMSampler

__all__ = ["SampleRequest", "Sampler", "SamplingParams", "TorchSampler", "vLLMSampler"]
