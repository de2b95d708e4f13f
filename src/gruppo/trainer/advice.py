"""What the numbers of a run say about their cause. Each rule names the cause and what to change."""

from collections.abc import Mapping, Sequence


def advice(recent: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences for the last steps' metrics (oldest first); empty when nothing stands out."""
    if len(recent) < 5:
        return []
    mean = {key: sum(m.get(key, 0.0) for m in recent) / len(recent) for key in recent[-1]}
    dead = mean.get("group/zero_std_frac", 0.0)
    said = []
    if mean.get("completion/truncated_frac", 0.0) > 0.5:
        said.append("over half of the completions hit max_new_tokens: raise it, or reward shorter answers")
    if dead > 0.95 and mean.get("reward/mean", 0.0) <= 0:
        said.append(
            "all groups are dead at reward 0: no completion earns anything, so nothing can be learned. If the reward "
            "was above 0 earlier the policy has collapsed: lower lr or raise beta; else the task is too hard as it is"
        )
    elif dead > 0.8 and mean.get("group/all_right_frac", 0.0) < 0.5:
        said.append("most groups have no signal: their completions all earn the same. Raise group_size or temperature")
    if mean.get("completion/empty_frac", 0.0) > 0.5:
        said.append("over half of the completions are empty: the model ends at once; check the prompt and end token")
    if mean.get("train/approx_kl", 0.0) > 1.0:
        said.append("the policy moves far within one batch (approx_kl > 1): lower lr or epochs_per_batch")
    if mean.get("sampler/logp_gap_max", 0.0) > 1.0:
        said.append("sampler and trainer disagree on log-probs by more than 1: are the sampler's weights stale?")
    return said
