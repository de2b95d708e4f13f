"""Rollouts, rewards and advantages of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gruppo.advantage import GRPOAdvantage, RLOOAdvantage
from gruppo.reward import RewardPool, RewardResult
from gruppo.types import Group, InputFeature, Prompt, Rollout, SampledSequence, SampleResponse


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of a step and what was measured on the way."""

    groups: tuple[Group, ...]
    metrics: dict[str, float]

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for g in self.groups for r in g.rollouts]


def score(
    prompts: Sequence[Prompt], responses: Sequence[SampleResponse], pool: RewardPool, *, step: int, seed: int
) -> tuple[list[list[SampledSequence]], RewardResult]:
    """Rewards of all sequences, groups one after the other."""
    groups = [list(response.sequences) for response in responses]
    owners = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    sequences = [s for group in groups for s in group]
    names = sorted({name for p in prompts for name in p.columns})
    result = pool.score(
        [p.source for p in owners],
        [s.text for s in sequences],
        completion_ids=[s.tokens for s in sequences],
        columns={name: [p.columns.get(name) for p in owners] for name in names},
        step=step,
        rng_seed=seed,
    )
    return groups, result


def collect(
    prompts: Sequence[Prompt],
    responses: Sequence[SampleResponse],
    pool: RewardPool,
    estimate: GRPOAdvantage | RLOOAdvantage,
    *,
    scale: str,
    step: int,
    seed: int,
) -> Collected:
    """Score the responses and give each sequence its advantage within its group."""
    groups, result = score(prompts, responses, pool, step=step, seed=seed)
    sequences = [s for group in groups for s in group]
    group_ids = [i for i, group in enumerate(groups) for _ in group]
    advantages = estimate(result.totals, scale=scale, group_ids=group_ids).tolist()  # type: ignore[arg-type]
    rollouts = [
        Rollout(
            sequence=sequence,
            reward=result.totals[i],
            rewards={name: values[i] for name, values in result.values.items()},
            advantage=advantages[i],
        )
        for i, sequence in enumerate(sequences)
    ]
    numbered = iter(rollouts)
    made = tuple(
        Group(prompt=prompt, rollouts=tuple(next(numbered) for _ in group))
        for prompt, group in zip(prompts, groups, strict=True)
    )
    return Collected(groups=made, metrics=result.metrics | rollout_metrics(made))


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's rollouts look like: rewards, groups without signal, lengths."""
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = sorted(len(r.sequence.tokens) for r in rollouts)
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    variance = sum((x - mean) ** 2 for x in rewards) / len(rewards) if rewards else 0.0
    dead = [g for g in groups if all(r.advantage == 0 for r in g.rollouts)]
    highest = max(rewards, default=0.0)
    all_right = [g for g in dead if all(r.reward is not None and r.reward == highest > 0 for r in g.rollouts)]
    return {
        "reward/mean": mean,
        "reward/std": variance**0.5,
        "group/zero_std_frac": len(dead) / len(groups),
        "group/all_right_frac": len(all_right) / len(groups),
        "completion/len_mean": sum(lengths) / len(lengths),
        "completion/len_p95": float(lengths[min(int(0.95 * len(lengths)), len(lengths) - 1)]),
        "completion/truncated_frac": sum(r.sequence.is_truncated for r in rollouts) / len(rollouts),
        "completion/empty_frac": sum(not r.sequence.text.strip() for r in rollouts) / len(rollouts),
    }


def training_rows(collected: Collected, *, mask_truncated: bool) -> dict[str, list[Any]]:
    """The sequences of a step as the trainer takes them: features without old log-probs, and the sampler's."""
    features, advantages, sampler_logps = [], [], []
    for rollout in collected.rollouts:
        sequence = rollout.sequence
        feature = InputFeature(prompt_ids=sequence.prompt_ids, completion_ids=sequence.tokens)
        logps = rollout.sequence.logps
        if mask_truncated and rollout.sequence.is_truncated:
            # Kept in the batch with nothing to score: it still counts as a sequence of the step.
            feature, logps = replace(feature, completion_mask=(0,) * len(feature.completion_ids)), ()
        features.append(feature)
        advantages.append(rollout.advantage)
        sampler_logps.append(logps)
    return {"features": features, "advantages": advantages, "sampler_logps": sampler_logps}
