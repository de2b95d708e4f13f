"""What the numbers of a run say about their cause. Each rule names the cause and what to change."""

from collections.abc import Mapping, Sequence


def advice(recent: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences for the last steps' metrics (oldest first); empty when nothing stands out."""
    if len(recent) < 5:
        return []
    keys = {key for metrics in recent for key in metrics}
    there = {key: [metrics[key] for metrics in recent if key in metrics] for key in keys}
    mean = {key: sum(values) / len(values) for key, values in there.items()}
    dead = mean.get("group/dead_frac", 0.0)
    said = []
    if mean.get("completion/truncated_frac", 0.0) > 0.5:
        said.append("over half of the completions hit max_new_tokens: raise it, or reward shorter answers")
    if "reward/mean" not in mean:
        said.append("no reward function has scored a completion: all of them abstain (None); check their columns")
    elif dead > 0.95 and mean["reward/mean"] <= 0:
        said.append(
            "all groups are dead at reward 0: no completion earns anything, so nothing can be learned. If the reward "
            "was above 0 earlier the policy has collapsed: lower lr or raise beta; else the task is too hard as it is"
        )
    elif dead > 0.8 and mean.get("group/all_right_frac", 0.0) < 0.5:
        said.append("most groups have no signal: their completions all earn the same. Raise group_size or temperature")
    if mean.get("completion/empty_frac", 0.0) > 0.5:
        said.append("over half of the completions are empty: the model ends at once; check the prompt and end token")
    if mean.get("live/approx_kl", 0.0) > 1.0:
        said.append("the policy moves far within one batch (approx_kl > 1): lower lr or epochs_per_batch")
    if mean.get("sampler/logp_gap_max", 0.0) > 1.0:
        said.append("sampler and trainer disagree on log-probs by more than 1: are the sampler's weights stale?")
    return said
