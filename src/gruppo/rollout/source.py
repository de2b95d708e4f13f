"""Source of rollouts: the prompts of a step, and which of its groups are trained on.

With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) a group without signal is left out, and further prompts are
sampled until the step is full or the bound is reached. Nothing here is drawn from a generator: the further prompts are
a function of the step, as the first ones are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gruppo.advantage import Groups
from gruppo.reward import RewardResult
from gruppo.reward.result import merged_metrics
from gruppo.rollout.driver import Driver, greedy
from gruppo.rollout.turn_metrics import turn_metrics
from gruppo.sampler.base import SamplingParams
from gruppo.task.order import prompt_indices, refill_indices
from gruppo.types import Group, Prompt


@dataclass(slots=True)
class SolvedPrompts:
    """Prompts that retire once all their completions were right on `after` visits in a row.

    One that is missed starts over. At least `keep` prompts always stay, so that a step can be filled.

    >>> solved = SolvedPrompts(after=2, num_prompts=3, keep=2)
    >>> for _ in range(2):
    ...     solved.see([(0, [True, True]), (1, [True, False]), (2, [True, True])])
    >>> sorted(solved.retired)  # the third would leave fewer than 2
    [0]
    """

    after: int = 0
    """Visits in a row; 0: nothing retires."""
    num_prompts: int = 0
    keep: int = 0
    retired: set[int] = field(default_factory=set)
    streak: dict[int, int] = field(default_factory=dict)
    """Solved visits in a row of prompts that are not retired."""

    def see(self, visits: Iterable[tuple[int, Sequence[bool | None]]]) -> None:
        """Count a step: the index of each prompt, and whether each of its completions was right."""
        if not self.after:
            return
        for index, right in visits:
            if not all(right):
                self.streak.pop(index, None)
                continue
            self.streak[index] = self.streak.get(index, 0) + 1
            if self.streak[index] >= self.after and self.num_prompts - len(self.retired) > self.keep:
                self.retired.add(index)
                del self.streak[index]

    def state(self) -> dict[str, list]:
        return {"retired": sorted(self.retired), "streak": sorted(self.streak.items())}

    def load(self, state: dict[str, list]) -> None:
        retired = {number_of(index) for index in state["retired"]}
        streak = {number_of(index): number_of(count) for index, count in state["streak"]}
        if retired and len(retired) >= self.num_prompts:
            raise ValueError(f"all {self.num_prompts} prompts are retired")
        self.retired, self.streak = retired, streak


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Samples and scores the groups of one step after the other."""

    prompts: Sequence[Prompt]
    driver: Driver
    solved: SolvedPrompts
    params: SamplingParams
    prompts_per_step: int
    group_size: int
    max_batches: int
    """Batches of prompts per step with dynamic sampling; 0: one batch, and nothing is left out."""
    shuffled: bool
    """The prompts come in a random order, not in their own."""
    has_signal: Callable[[Sequence[Group]], list[bool]]
    """Whether each of some groups teaches something."""
    needs_greedy: bool
    """The estimator compares with a greedy completion of each prompt."""

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
            params = replace(self.params, step=number)
            drawn, result = self.driver.play(prompts, self.group_size, params, step=number - 1)
            if self.needs_greedy:
                alone, _ = self.driver.play(prompts, 1, greedy(params), step=number - 1)
                drawn = [replace(g, greedy=a.rollouts[0]) for g, a in zip(drawn, alone, strict=True)]
            results.append(result)
            teaches = self.has_signal(drawn) if self.max_batches else [True] * len(drawn)
            for group, has_signal in zip(drawn, teaches, strict=True):
                is_full = num_kept == self.prompts_per_step
                status = "no_signal" if not has_signal else "surplus" if is_full else "kept"
                num_kept += status == "kept"
                groups.append(replace(group, status=status))
        # Of everything that was sampled: what was kept is a selection.
        metrics = merged_metrics(results) | rollout_metrics(groups)
        return groups, metrics | (dynamic_metrics(groups, len(results)) if self.max_batches else {})

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


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Groups without signal, lengths and entropy, over all of these groups. Rewards are the scorer's to report."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {}
    sequences = [r.trajectory for r in rollouts]
    lengths = sorted(s.num_sampled for s in sequences)
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
        **turn_metrics(sequences),
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


def number_of(value: Any) -> int:
    """A step, a version or the index of a prompt out of a file; those of a run fit into 32 bits."""
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.80} is not a number of a step, of a version or of a prompt")
    return value
