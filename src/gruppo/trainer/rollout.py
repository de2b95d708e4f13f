"""Rollouts of a step: which prompts, sampled and scored, and which groups are trained on.

With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) a group without signal is left out, and further prompts are
sampled until the step is full or the bound is reached. Nothing here is drawn from a generator: the further prompts are
a function of the step, as the first ones are.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from gruppo.advantage import Groups
from gruppo.reward import RewardResult, RewardScorer
from gruppo.reward.scorer import merged_metrics
from gruppo.sampler.base import Sampler, Samples, SamplingParams
from gruppo.task.order import prompt_indices, refill_indices
from gruppo.trainer.advantages import AdvantageStage
from gruppo.trainer.state import SolvedPrompts
from gruppo.types import Group, Prompt, Rollout

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Samples and scores the groups of one step after the other."""

    prompts: Sequence[Prompt]
    sampler: Sampler
    scorer: RewardScorer
    stage: AdvantageStage
    """Which groups teach something, and whether they need a greedy completion."""
    solved: SolvedPrompts
    params: SamplingParams
    prompts_per_step: int
    group_size: int
    max_batches: int
    """Batches of prompts per step with dynamic sampling; 0: one batch, and nothing is left out."""
    shuffled: bool
    """The prompts come in a random order, not in their own."""
    timed: Timed

    def next(self, number: int) -> tuple[list[Group], dict[str, float]]:
        """All groups of step `number`, counted from 1, in the order in which they were drawn, and their metrics."""
        groups: list[Group] = []
        results: list[RewardResult] = []
        used: set[int] = set()
        num_kept = 0
        while num_kept < self.prompts_per_step and len(results) < max(self.max_batches, 1):
            prompts = self.draw(number - 1, used, is_first=not results)
            if not prompts:
                break
            drawn, result = self._sample(prompts, self.group_size, number, replace(self.params, step=number))
            if "greedy_rewards" in getattr(self.stage.estimate, "needs", ()):
                alone, _ = self._sample(prompts, 1, number, greedy(self.params))
                drawn = [replace(g, greedy=a.rollouts[0]) for g, a in zip(drawn, alone, strict=True)]
            results.append(result)
            teaches = self.stage.has_signal(drawn) if self.max_batches else [True] * len(drawn)
            for group, has_signal in zip(drawn, teaches, strict=True):
                is_full = num_kept == self.prompts_per_step
                status = "no_signal" if not has_signal else "surplus" if is_full else "kept"
                num_kept += status == "kept"
                groups.append(replace(group, status=status))
        # Of everything that was sampled: what was kept is a selection.
        metrics = merged_metrics(results) | rollout_metrics(groups)
        return groups, metrics | (dynamic_metrics(groups, len(results)) if self.max_batches else {})

    def _sample(
        self, prompts: list[Prompt], num_samples: int, number: int, params: SamplingParams
    ) -> tuple[list[Group], RewardResult]:
        with self.timed("sample"):
            samples = self.sampler.draw(prompts, num_samples, params)
        with self.timed("reward"):
            return score(prompts, samples, self.scorer, step=number - 1, seed=self.params.seed)

    def draw(self, step: int, used: set[int], *, is_first: bool) -> list[Prompt]:
        """The next batch of prompts, without solved ones and without those that this step has had."""
        chosen: list[int] = []
        retired, seed = self.solved.retired, self.params.seed
        if is_first:
            first = prompt_indices(len(self.prompts), step, self.prompts_per_step, seed, shuffled=self.shuffled)
            chosen = [i for i in first if self.prompts[i].index not in retired]
        if len(chosen) < self.prompts_per_step:
            taken = used | set(chosen)
            size = self.prompts_per_step
            for i in refill_indices(len(self.prompts), step, size, seed, shuffled=self.shuffled):
                if len(chosen) == self.prompts_per_step:
                    break
                if i not in taken and self.prompts[i].index not in retired:
                    chosen.append(i)
        used.update(chosen)
        return [self.prompts[i] for i in chosen]


def greedy(params: SamplingParams) -> SamplingParams:
    """The same limits, and always the likeliest token."""
    return SamplingParams(temperature=0.0, max_new_tokens=params.max_new_tokens, stop=params.stop)


def score(
    prompts: Sequence[Prompt], samples: Sequence[Samples], scorer: RewardScorer, *, step: int, seed: int
) -> tuple[list[Group], RewardResult]:
    """The completions of each prompt as a group of scored rollouts, and what the reward functions gave."""
    owners = [prompt for prompt, drawn in zip(prompts, samples, strict=True) for _ in drawn]
    sequences = [trajectory for drawn in samples for trajectory in drawn]
    names = sorted({name for p in prompts for name in p.columns})
    result = scorer.score(
        [p.source for p in owners],
        [s.text for s in sequences],
        completion_ids=[s.tokens for s in sequences],
        prompt_texts=[p.text for p in owners],
        columns={name: [p.columns.get(name) for p in owners] for name in names},
        step=step,
        rng_seed=seed,
        group_ids=[i for i, drawn in enumerate(samples) for _ in drawn],
    )
    rollouts = iter([
        Rollout(
            trajectory=trajectory,
            reward=result.totals[i],
            rewards={name: values[i] for name, values in result.values.items()},
            correct=result.correct[i],
            extras={name: values[i] for name, values in result.extras.items()},
            errors={name: reasons[i] for name, reasons in result.failures.items() if i in reasons},
        )
        for i, trajectory in enumerate(sequences)
    ])  # fmt: skip
    groups = [
        Group(prompt=prompt, rollouts=tuple(next(rollouts) for _ in drawn))
        for prompt, drawn in zip(prompts, samples, strict=True)
    ]
    return groups, result


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Groups without signal, lengths and entropy, over all of these groups. Rewards are the scorer's to report."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {}
    sequences = [r.trajectory for r in rollouts]
    lengths = sorted(len(s.tokens) for s in sequences)
    ids = [i for i, g in enumerate(groups) for _ in g.rollouts]
    has_spread = Groups.read([r.reward for r in rollouts], 1, ids, "group").has_spread().tolist()
    right = [[r.correct for r in g.rollouts] for g in groups]
    tokens = [e for s in sequences for e in (s.entropies or [-logp for logp in s.logps or ()])]
    return {
        "group/zero_std_frac": has_spread.count(False) / len(groups),
        **(all_alike(right) if any(flag is not None for flags in right for flag in flags) else {}),
        "completion/len_mean": sum(lengths) / len(lengths),
        "completion/len_p95": float(lengths[min(int(0.95 * len(lengths)), len(lengths) - 1)]),
        "completion/truncated_frac": sum(s.is_truncated for s in sequences) / len(sequences),
        "completion/empty_frac": sum(not s.text.strip() for s in sequences) / len(sequences),
        **({"rollout/entropy": sum(tokens) / len(tokens)} if tokens else {}),
    }


def all_alike(right: Sequence[Sequence[bool | None]]) -> dict[str, float]:
    """Shares of groups whose answers are all right, and all wrong."""
    return {
        "group/all_right_frac": sum(all(flags) for flags in right) / len(right),
        "group/all_wrong_frac": sum(all(flag is False for flag in flags) for flags in right) / len(right),
    }


def dynamic_metrics(groups: Sequence[Group], num_batches: int) -> dict[str, float]:
    """Groups by what dynamic sampling did with them."""
    statuses = [group.status for group in groups]
    return {
        "dynamic/batches": float(num_batches),
        "dynamic/groups_sampled": float(len(groups)),
        "dynamic/groups_kept": float(statuses.count("kept")),
        "dynamic/groups_dropped": float(statuses.count("no_signal")),
        "dynamic/groups_surplus": float(statuses.count("surplus")),
    }


def dead_frac(groups: Sequence[Group]) -> float:
    """Share of the sampled groups that teach nothing: left out for it, or kept with all advantages 0."""
    dead = [
        group.status == "no_signal" or (group.status == "kept" and not any(r.has_advantage for r in group.rollouts))
        for group in groups
    ]
    return sum(dead) / len(dead) if dead else 1.0
