"""Kernels: log-probs, entropies and gradients from hidden states and the output weight; attention over shared prompts.

    reference.py         a few plain lines in float32: what every kernel is checked against
    dense.py             few logits, all at once, with their own backward
    head.py              Head: many logits, a window of tokens at a time, with any loss; no [N, V] tensor is ever held
    chunk_ops.py         statistics and gradients of a chunk of logits in torch operations
    triton_chunk_ops.py  the same in Triton
    triton_logits.py     the product with the softmax in its epilogue, for bf16 on Hopper: logits never reach memory
    shared_prompt_attention.py  completions look at their prompt and themselves
    index.py             rows by index with a cheap backward

To add a kernel, write it beside its reference with the same signature and a test that compares the two, and register
it with `torch.library`, so that compilers and fake tensors know it.
"""

from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.head import Head, memory_estimate
from gruppo.kernel.reference import linear_logps_and_entropy, logps_and_entropy

__all__ = ["Head", "LogitShape", "linear_logps_and_entropy", "logps_and_entropy", "memory_estimate"]
