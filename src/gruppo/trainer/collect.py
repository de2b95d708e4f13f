"""Rewards and advantages of a step, and the step as the model takes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gruppo.advantage import Advantage
from gruppo.reward import RewardPool, RewardResult
from gruppo.reward.shape import RewardShape
from gruppo.types import Group, InputFeature, Prompt, Rollout, SampledSequence, SampleResponse


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of a step and what was measured on the way."""

    groups: tuple[Group, ...]
    metrics: dict[str, float]

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for g in self.groups for r in g.rollouts]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The completions of a prompt with their rewards, not yet compared."""

    prompt: Prompt
    sequences: tuple[SampledSequence, ...]
    rewards: tuple[float | None, ...]
    """Weighted sums."""
    parts: tuple[Mapping[str, float | None], ...]
    """Each function's own value."""

    @property
    def has_signal(self) -> bool:
        """Are there two different rewards? Shapes and penalties do not count: DAPO looks at the answers."""
        return len({r for r in self.rewards if r is not None}) > 1


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


def scored_groups(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[SampledSequence]], result: RewardResult
) -> list[ScoredGroup]:
    """What `score` gave, group by group."""
    rows = zip(result.totals, _rows(result.values, len(result.totals)), strict=True)
    made = []
    for prompt, sequences in zip(prompts, groups, strict=True):
        rewards, parts = zip(*(next(rows) for _ in sequences), strict=True)
        made.append(ScoredGroup(prompt, tuple(sequences), rewards, parts))
    return made


def shaped_rewards(groups: Sequence[ScoredGroup], shape: RewardShape) -> list[float | None]:
    """The rewards of all sequences as training compares them."""
    sequences = [s for g in groups for s in g.sequences]
    rewards = [r for g in groups for r in g.rewards]
    return shape(rewards, [len(s.tokens) for s in sequences], [s.is_truncated for s in sequences])


def estimate_advantages(
    groups: Sequence[ScoredGroup],
    rewards: Sequence[float | None],
    estimate: Advantage,
    *,
    scale: str | None = None,
    greedy_rewards: Sequence[float | None] | None = None,
    is_shaped: bool = False,
) -> list[float]:
    """One advantage per sequence, groups one after the other.

    An estimator that takes the functions apart gets their values, and what shaping changed as one more column.
    """
    lengths = [len(s.tokens) for g in groups for s in g.sequences]
    if not lengths:
        return []
    inputs = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    options: dict[str, Any] = {name: inputs[name] for name in getattr(estimate, "needs", ())}
    if scale is not None:
        options["scale"] = scale
    compared: Sequence[Any] = rewards
    if getattr(estimate, "per_reward", False):
        compared = [list(part.values()) for g in groups for part in g.parts]
        if is_shaped:
            plain = [r for g in groups for r in g.rewards]
            changes = [None if a is None or b is None else a - b for a, b in zip(rewards, plain, strict=True)]
            compared = [[*row, change] for row, change in zip(compared, changes, strict=True)]
    group_ids = [i for i, g in enumerate(groups) for _ in g.sequences]
    return estimate(compared, group_ids=group_ids, **options).tolist()


def make_groups(
    groups: Sequence[ScoredGroup], rewards: Sequence[float | None], advantages: Sequence[float]
) -> tuple[Group, ...]:
    """Groups with their advantages. Where the rewards that were compared are others, they stand beside the rewards."""
    is_shaped = list(rewards) != [r for g in groups for r in g.rewards]
    numbers = iter(zip(rewards, advantages, strict=True))
    made = []
    for group in groups:
        rollouts = []
        for sequence, reward, parts in zip(group.sequences, group.rewards, group.parts, strict=True):
            shaped, advantage = next(numbers)
            more = {"shaped": shaped} if is_shaped else {}
            rollouts.append(Rollout(sequence=sequence, reward=reward, rewards={**parts, **more}, advantage=advantage))
        made.append(Group(prompt=group.prompt, rollouts=tuple(rollouts)))
    return tuple(made)


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


def minibatch_parts(groups: Sequence[Group], minibatches: int) -> list[slice]:
    """The sequences of each minibatch: whole groups, as many in each as there can be, none when there are too few."""
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group.rollouts))
    cuts = [ends[i * len(groups) // minibatches] for i in range(minibatches + 1)]
    return [slice(start, end) for start, end in pairwise(cuts)]


def _rows(columns: Mapping[str, Sequence[float | None]], num: int) -> Iterator[dict[str, float | None]]:
    return ({name: values[i] for name, values in columns.items()} for i in range(num))
