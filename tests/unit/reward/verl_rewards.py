"""Reward functions with verl's signature, as people bring them."""

import asyncio
import time

from gruppo.errors import InputError


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A number: 1 for a right answer; it needs all four."""
    if data_source != "openai/gsm8k" or extra_info["split"] != "train":
        raise InputError("the arguments are not those of the row")
    extra_info["num_turns"] = 1  # verl's own functions write into it
    return 1.0 if solution_str.strip() == ground_truth else 0.1 * (solution_str != "")


def with_parts(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs, f"verl gives no other argument, got {sorted(kwargs)}"
    is_right = solution_str == ground_truth
    return {"score": 2.0 * is_right - 1, "acc": is_right, "length": len(solution_str), "pred": solution_str}


async def judged(solution_str, ground_truth, **kwargs):
    await asyncio.sleep(0.2 if solution_str == "slow" else 0)
    return {"score": float(solution_str == ground_truth), "source": kwargs["data_source"]}


def hangs_on_hang(solution_str, ground_truth):
    while solution_str == "hang":
        time.sleep(0.01)
    return float(solution_str == ground_truth)


def raises_on_bad(solution_str, ground_truth):
    if solution_str == "bad":
        raise ValueError("no number in it")
    return float(solution_str == ground_truth)


def without_score(solution_str, ground_truth):
    return {"acc": 1.0}


def needs_more(solution_str, ground_truth, difficulty):
    return difficulty * (solution_str == ground_truth)


class Scaled:
    """A class with options, in this process."""

    isolated = False

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return self.factor * (solution_str == ground_truth)
