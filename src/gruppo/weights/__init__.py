"""Weights on their way: from a model id, into folders, and from the trainer to samplers.

    source.py  model ids: a folder or a hub, tokenizer, config; which are refused
    files.py   folders that are complete or do not exist
    store.py   WeightStore: publishes the trainer's weights for samplers
    canary.py  fixed tokens whose log-probs show which weights a sampler has

Imports neither the model nor the samplers.
"""

from gruppo.weights.store import Published, WeightStore

__all__ = ["Published", "WeightStore"]
