"""Advice: what the numbers of a run point to and what to change, by the registry of keys and by rules on two keys."""

from collections.abc import Mapping, Sequence

from gruppo.keys import find

FEWEST_STEPS = 5
"""Steps below which no advice is given."""


def advice(recent: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences for the last steps' metrics, by their means; empty when nothing stands out."""
    if len(recent) < FEWEST_STEPS:
        return []
    names = dict.fromkeys(name for metrics in recent for name in metrics)
    values = {name: [metrics[name] for metrics in recent if name in metrics] for name in names}
    mean = {name: sum(all_values) / len(all_values) for name, all_values in values.items()}
    sentences, dead = [], mean.get("group/dead_frac", 0.0)
    if "reward/mean" not in mean:
        sentences.append("no reward function has scored a completion: all of them abstain (None); check their columns")
    elif dead > 0.95 and mean["reward/mean"] <= 0:
        sentences.append(
            "all groups are dead at reward 0: no completion earns anything, so nothing can be learned. If the reward "
            "was above 0 earlier the policy has collapsed: lower lr or raise beta; else the task is too hard as it is, "
            "or the reward does not read the form of the completions: try `gruppo reward check`"
        )
    elif dead > 0.8 and mean.get("group/all_right_frac", 0.0) < 0.5:
        sentences.append(
            "most groups have no signal: their completions all earn the same. Raise group_size or temperature"
        )
    for name, value in mean.items():
        key = find(name)
        if key is not None and key.healthy is not None:
            low, high = key.healthy
            if value < low or value > high:  # never for nan, which is no number to judge
                bound = f"below {low:g}" if value < low else f"above {high:g}"
                sentences.append(f"{name} is {value:.3g}, {bound}: {key.remedy}")
    return sentences
