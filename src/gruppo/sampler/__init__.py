"""Samplers: prompts become groups of sampled trajectories. To add an engine, subclass Sampler."""

from gruppo.sampler.base import Sampler, SampleRequest, SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler
from gruppo.sampler.vllm.sampler import vLLMSampler

__all__ = ["SampleRequest", "Sampler", "SamplingParams", "TorchSampler", "vLLMSampler"]
