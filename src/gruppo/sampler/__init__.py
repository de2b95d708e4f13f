"""Rollouts: prompts become groups of sampled sequences.

    base.py           Sampler: what the trainer asks of any sampler
    params.py         SamplingParams: temperature, filters, limits, stops
    randomness.py     uniforms that are a function of (seed, step, prompt, sample, position)
    torch_sampler.py  TorchSampler: KV-cache decoding of a transformers model in this process

A sampler returns the tokens it drew and their log-probs under the sampling policy; nobody re-tokenises or recomputes
them. Another engine is another class with `sample`.
"""

from gruppo.sampler.base import Sampler
from gruppo.sampler.params import SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler

__all__ = ["Sampler", "SamplingParams", "TorchSampler"]
