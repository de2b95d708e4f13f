"""Rollouts: prompts become groups of sampled trajectories.

A sampler returns the tokens it drew and their log-probs under the sampling policy; they are never re-tokenised or
recomputed. Nothing here imports the model, the losses or the metrics. Another engine is another subclass of Sampler.
"""

from gruppo.sampler.base import Sampler, SampleRequest, SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler
from gruppo.sampler.vllm.sampler import vLLMSampler

__all__ = ["SampleRequest", "Sampler", "SamplingParams", "TorchSampler", "vLLMSampler"]
