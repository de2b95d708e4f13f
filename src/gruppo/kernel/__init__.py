"""What runs where: log-probs and entropies from logits, or from hidden states and the head's weight.

    reference.py  a few plain lines in float32: what every kernel is checked against
    head.py       the same numbers without ever holding a [T, V] tensor, in torch ops (CPU and any GPU)

All of them have one signature, so a caller can swap them.
"""

from gruppo.kernel.head import chunked_linear_logps_and_entropy
from gruppo.kernel.reference import linear_logps_and_entropy, logps_and_entropy

__all__ = ["chunked_linear_logps_and_entropy", "linear_logps_and_entropy", "logps_and_entropy"]
