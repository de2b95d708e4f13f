"""What runs where: log-probs, entropies and their gradients from hidden states and the head's weight.

    reference.py      a few plain lines in float32: what every kernel is checked against
    head.py           Head: the walk over windows of tokens, with any loss; no [N, V] tensor is ever held
    chunked.py        the same for autograd, where the loss is not known in the forward
    sizes.py          how many rows are held at a time; the memory of a step before it is taken
    rows.py           row operations on a chunk of logits in torch ops: CPU, and any GPU without Triton
    triton_rows.py    the same in Triton
    triton_logits.py  the product with the softmax in its epilogue, for bf16 on Hopper: logits never reach memory
    whole.py          the head for few logits: all of them at once, with its own backward
    gather.py         rows by index with a cheap backward

To add a kernel, write it beside its reference with the same signature and a test that compares the two.
"""

from gruppo.kernel.chunked import chunked_linear_logps_and_entropy
from gruppo.kernel.head import Head
from gruppo.kernel.reference import linear_logps_and_entropy, logps_and_entropy
from gruppo.kernel.rows import LogitShape
from gruppo.kernel.sizes import memory_estimate

__all__ = [
    "Head",
    "LogitShape",
    "chunked_linear_logps_and_entropy",
    "linear_logps_and_entropy",
    "logps_and_entropy",
    "memory_estimate",
]
