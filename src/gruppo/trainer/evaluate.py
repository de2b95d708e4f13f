"""Held-out score: greedy accuracy with a confidence interval, and unbiased pass@k from samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from gruppo.metric import pass_at_k
from gruppo.reward import RewardPool
from gruppo.sampler import Sampler, SamplingParams
from gruppo.trainer.collect import score
from gruppo.types import Prompt, SampledSequence

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Evaluation:
    metrics: dict[str, float]
    greedy: tuple[SampledSequence, ...]
    rewards: tuple[float | None, ...]
    """Of the greedy completions."""

    @property
    def accuracy(self) -> float:
        return self.metrics["eval/accuracy"]


def evaluate(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    pool: RewardPool,
    params: SamplingParams,
    *,
    num_samples: int = 0,
    correct_at: float = 1.0,
) -> Evaluation:
    """Greedy completions of all prompts; with `num_samples` also sampled ones at the params' temperature."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=params.max_new_tokens, stop=params.stop)
    groups, result = score(prompts, sampler.sample(prompts, 1, greedy), pool, step=params.step, seed=params.seed)
    correct = [_is_correct(r, correct_at) for r in result.totals]
    low, high = wilson_interval(sum(correct), len(correct))
    rewards = [r for r in result.totals if r is not None]
    metrics = {
        "eval/accuracy": sum(correct) / len(correct),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": sum(rewards) / len(rewards) if rewards else 0.0,
    }
    if num_samples:
        groups_n, sampled = score(
            prompts, sampler.sample(prompts, num_samples, params), pool, step=params.step, seed=params.seed
        )
        counts = []
        totals = iter(sampled.totals)
        for group in groups_n:
            counts.append(sum(_is_correct(next(totals), correct_at) for _ in group))
        metrics |= pass_at_k_metrics(counts, num_samples)
    return Evaluation(metrics, tuple(g[0] for g in groups), tuple(result.totals))


def pass_at_k_metrics(num_correct: Sequence[int], num_samples: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... n: mean over prompts, with the 95 % interval of that mean."""
    metrics: dict[str, float] = {}
    k = 1
    while k <= num_samples:
        values = [pass_at_k(num_samples, c, k) for c in num_correct]
        mean = sum(values) / len(values)
        spread = sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1) / len(values))
        metrics[f"eval/pass@{k}"] = mean
        metrics[f"eval/pass@{k}_low"] = max(mean - Z95 * spread, 0.0)
        metrics[f"eval/pass@{k}_high"] = min(mean + Z95 * spread, 1.0)
        k *= 2
    return metrics


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
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


def _is_correct(reward: float | None, correct_at: float) -> bool:
    return reward is not None and reward >= correct_at
