"""Weights on their way: from a model id into folders, and from the trainer to samplers. Importing it needs no torch."""

from gruppo.weights.store import Published, WeightStore

__all__ = ["Published", "WeightStore"]
