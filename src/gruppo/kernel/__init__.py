"""Kernels: log-probs, entropies and gradients from hidden states and the output weight; attention over shared prompts.

To add a kernel, write it beside its reference with the same signature and a test that compares the two, and register
it with `torch.library`, so that compilers and fake tensors know it.
"""

from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.head import Head, memory_estimate
from gruppo.kernel.logps import linear_logps_and_entropy, logps_and_entropy

__all__ = ["Head", "LogitShape", "linear_logps_and_entropy", "logps_and_entropy", "memory_estimate"]
