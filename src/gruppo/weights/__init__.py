"""Weights on their way: from a model id, into folders, and from the trainer to samplers.

Imports neither the model nor the samplers.
"""

from gruppo.weights.store import Published, WeightStore

__all__ = ["Published", "WeightStore"]
