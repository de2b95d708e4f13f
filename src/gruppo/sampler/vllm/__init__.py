"""Rollouts from vLLM, in this process or behind HTTP. vLLM is imported when an engine starts in this process."""
