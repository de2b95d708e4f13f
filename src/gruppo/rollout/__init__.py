"""Rollouts: prompts are chosen, sampled and scored, in step with training, ahead of it or streamed.

`driver.py` is the only caller of the sampler: what else may write into a completion belongs there.
"""
