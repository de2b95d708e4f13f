"""Weights on their way: from a model id, into folders, and from the trainer to samplers.

    source.py  model ids: a folder or a hub, tokenizer, config; which are refused
    files.py   folders that are complete or do not exist

Imports neither the model nor the samplers.
"""
