"""Several processes that share a step: ranks.py deals out its micro-batches and reduces what they computed."""
