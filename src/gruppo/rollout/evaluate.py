"""Held-out score: greedy accuracy or reward with a confidence interval, and unbiased pass@k from samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from gruppo.errors import InputError
from gruppo.keys import HELD_OUT_SCORES, held_out_key, held_out_name
from gruppo.metric import pass_at_k
from gruppo.rollout.driver import Driver, greedy
from gruppo.sampler import SamplingParams
from gruppo.types import Group, Prompt, Rollout

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out score of a model."""

    metrics: dict[str, float]
    greedy: tuple[Rollout, ...]
    """The greedy completion of each prompt, scored."""
    sampled: tuple[Group, ...] = ()
    """The sampled completions of each prompt, where there are any."""

    def groups(self) -> list[Group]:
        """All completions of each prompt: the greedy one is the first."""
        sampled = [group.rollouts for group in self.sampled] or [()] * len(self.greedy)
        return [
            Group(prompt=first.trajectory.prompt, rollouts=(first, *others))
            for first, others in zip(self.greedy, sampled, strict=True)
        ]

    @property
    def accuracy(self) -> float | None:
        """Share of right greedy answers; None where no reward decides what is right."""
        return self.metrics.get("eval/accuracy")

    @property
    def name(self) -> str:
        """What `score` is: "held-out accuracy", or "held-out reward" where no reward decides what is right."""
        return held_out_name(held_out_key(self.metrics) or HELD_OUT_SCORES[1])

    @property
    def score(self) -> float | None:
        """The accuracy, else the mean reward; None where no completion has a reward either."""
        key = held_out_key(self.metrics)
        return None if key is None else self.metrics[key]


def evaluate(prompts: Sequence[Prompt], driver: Driver, params: SamplingParams, *, num_samples: int = 0) -> Evaluation:
    """Greedy completions of all prompts; with `num_samples` also sampled ones at the params' temperature.

    An answer is right where the scorer marks it correct. One that it leaves open counts as wrong. Where no reward
    decides what is right, there is no accuracy.
    """
    scorer, step = driver.scorer, params.step or 0
    assert scorer is not None, "an evaluation needs rewards"
    if num_samples and scorer.correct_by is None:
        raise InputError(f"num_samples={num_samples} is for pass@k, and {scorer.verdict}")
    groups, _ = driver.play(prompts, 1, greedy(params), step=step)
    rollouts = [group.rollouts[0] for group in groups]
    metrics = {}
    if scorer.correct_by is not None:
        right = sum(rollout.correct is True for rollout in rollouts)
        low, high = wilson_interval(right, len(rollouts))
        metrics = {"eval/accuracy": right / len(rollouts), "eval/accuracy_low": low, "eval/accuracy_high": high}
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if rewards:
        metrics["eval/reward"] = mean = fmean(rewards)
        if len(rewards) > 1:
            half = Z95 * stdev(rewards) / sqrt(len(rewards))
            metrics |= {"eval/reward_low": mean - half, "eval/reward_high": mean + half}
    sampled: list[Group] = []
    if num_samples:
        sampled, _ = driver.play(prompts, num_samples, params, step=step)
        counts = [sum(rollout.correct is True for rollout in group.rollouts) for group in sampled]
        metrics |= pass_at_k_metrics(counts, num_samples)
    return Evaluation(metrics, tuple(rollouts), tuple(sampled))


def pass_at_k_metrics(num_correct: Sequence[int], num_samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... n: mean over prompts, with a 95 % interval (docs/metrics.md)."""
    metrics: dict[str, float] = {}
    for k in (2**i for i in range(num_samples.bit_length())):
        values = [pass_at_k(num_samples, c, k) for c in num_correct]
        mean = sum(values) / len(values)
        low, high = wilson_interval(mean * len(values), len(values))
        metrics |= {f"eval/pass@{k}": mean, f"eval/pass@{k}_low": low, f"eval/pass@{k}_high": high}
    return metrics


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion; right at the ends, where the normal one is not.

    >>> low, high = wilson_interval(10, 10)
    >>> round(low, 3), round(high, 3)
    (0.722, 1.0)
    """
    if trials == 0:
        return 0.0, 1.0
    p, z2 = successes / trials, Z95**2
    center = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(center - half, 0.0), min(center + half, 1.0)
