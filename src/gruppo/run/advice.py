"""Advice: sentences on what the numbers of a run point to. Each rule names the cause and what to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FEWEST_STEPS = 5
"""Fewer steps than this say nothing."""

Means = Mapping[str, float]
"""The mean of each metric over the last steps; a key that no step reported is absent."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A sentence, and when it is due."""

    holds: Callable[[Means], bool]
    text: str


def _above(key: str, limit: float) -> Callable[[Means], bool]:
    return lambda mean: mean.get(key, 0.0) > limit


def _is_dead_at_zero(mean: Means) -> bool:
    return mean.get("group/dead_frac", 0.0) > 0.95 and mean.get("reward/mean", 1.0) <= 0


def _lacks_signal(mean: Means) -> bool:
    is_dead = "reward/mean" in mean and mean.get("group/dead_frac", 0.0) > 0.8
    return is_dead and not _is_dead_at_zero(mean) and mean.get("group/all_right_frac", 0.0) < 0.5


RULES = (
    Rule(
        _above("completion/truncated_frac", 0.5),
        "over half of the completions hit max_new_tokens: raise it, or reward shorter answers",
    ),
    Rule(
        lambda mean: "reward/mean" not in mean,
        "no reward function has scored a completion: all of them abstain (None); check their columns",
    ),
    Rule(
        _is_dead_at_zero,
        "all groups are dead at reward 0: no completion earns anything, so nothing can be learned. If the reward "
        "was above 0 earlier the policy has collapsed: lower lr or raise beta; else the task is too hard as it is",
    ),
    Rule(
        _lacks_signal,
        "most groups have no signal: their completions all earn the same. Raise group_size or temperature",
    ),
    Rule(
        _above("completion/empty_frac", 0.5),
        "over half of the completions are empty: the model ends at once; check the prompt and end token",
    ),
    Rule(
        _above("live/approx_kl", 1.0),
        "the policy moves far within one batch (approx_kl > 1): lower lr or epochs_per_batch",
    ),
    Rule(
        _above("sampler/logp_gap_max", 1.0),
        "sampler and trainer disagree on log-probs by more than 1: are the sampler's weights stale?",
    ),
)


def advice(recent: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences for the last steps' metrics; empty when nothing stands out."""
    if len(recent) < FEWEST_STEPS:
        return []
    keys = {key for metrics in recent for key in metrics}
    there = {key: [metrics[key] for metrics in recent if key in metrics] for key in keys}
    mean = {key: sum(values) / len(values) for key, values in there.items()}
    return [rule.text for rule in RULES if rule.holds(mean)]
