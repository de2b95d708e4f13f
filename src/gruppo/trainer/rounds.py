"""The groups of a step: which prompts, sampled and scored, and what is dropped and sampled again.

With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) a group whose rewards are all equal is dropped, and further
prompts are sampled until the step is full or the bound is reached. Nothing here is drawn from a generator: the further
prompts are a function of the step, as the first ones are.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from gruppo.reward import RewardPool, RewardResult
from gruppo.reward.combine import merged_metrics
from gruppo.sampler.base import Sampler
from gruppo.sampler.params import SamplingParams
from gruppo.task.order import prompt_indices, refill_indices
from gruppo.trainer.collect import ScoredGroup, score, scored_groups
from gruppo.trainer.solved import SolvedPrompts
from gruppo.types import Prompt

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Rounds:
    """What was sampled for a step, in the order in which it was drawn."""

    kept: list[ScoredGroup] = field(default_factory=list)
    dropped: list[ScoredGroup] = field(default_factory=list)
    """Without signal."""
    surplus: list[ScoredGroup] = field(default_factory=list)
    """With signal, beyond the size of a step."""
    results: list[RewardResult] = field(default_factory=list)
    """One per batch."""

    @property
    def groups(self) -> list[ScoredGroup]:
        return [*self.kept, *self.dropped, *self.surplus]

    @property
    def metrics(self) -> dict[str, float]:
        """Rewards over all that was sampled: what was kept is a selection, and its mean reward means little."""
        return merged_metrics(self.results)

    @property
    def counts(self) -> dict[str, float]:
        """What dynamic sampling did."""
        return {
            "dynamic/batches": float(len(self.results)),
            "dynamic/groups_sampled": float(len(self.groups)),
            "dynamic/groups_kept": float(len(self.kept)),
            "dynamic/groups_dropped": float(len(self.dropped)),
            "dynamic/groups_surplus": float(len(self.surplus)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gatherer:
    """Fills a step with groups."""

    prompts: Sequence[Prompt]
    sampler: Sampler
    pool: RewardPool
    solved: SolvedPrompts
    prompts_per_step: int
    group_size: int
    max_batches: int
    """Batches of prompts per step with dynamic sampling; 0: one batch, and nothing is dropped."""
    seed: int

    def gather(self, number: int, params: SamplingParams, timed: Timed) -> Rounds:
        """The groups of step `number`, counted from 1."""
        rounds = Rounds()
        used: set[int] = set()
        while len(rounds.kept) < self.prompts_per_step and len(rounds.results) < max(self.max_batches, 1):
            prompts = self._draw(number - 1, used, is_first=not rounds.results)
            if not prompts:
                break
            with timed("sample"):
                responses = self.sampler.sample(prompts, self.group_size, params)
            with timed("reward"):
                sequences, result = score(prompts, responses, self.pool, step=number - 1, seed=self.seed)
            rounds.results.append(result)
            for group in scored_groups(prompts, sequences, result):
                if self.max_batches and not group.has_signal:
                    rounds.dropped.append(group)
                elif len(rounds.kept) == self.prompts_per_step:
                    rounds.surplus.append(group)
                else:
                    rounds.kept.append(group)
        return rounds

    def greedy(self, groups: Sequence[ScoredGroup], number: int, params: SamplingParams) -> list[ScoredGroup]:
        """The greedy completion of each group's prompt, scored, as a group of one."""
        greedy = SamplingParams(temperature=0.0, max_new_tokens=params.max_new_tokens, stop=params.stop)
        prompts = [group.prompt for group in groups]
        sequences, result = score(
            prompts, self.sampler.sample(prompts, 1, greedy), self.pool, step=number - 1, seed=self.seed
        )
        return scored_groups(prompts, sequences, result)

    def _draw(self, step: int, used: set[int], *, is_first: bool) -> list[Prompt]:
        """The next batch of prompts, without solved ones and without those that this step has had."""
        chosen: list[int] = []
        if is_first:
            first = prompt_indices(len(self.prompts), step, self.prompts_per_step, self.seed)
            chosen = [i for i in first if self._is_open(i)]
        if len(chosen) < self.prompts_per_step:
            taken = used | set(chosen)
            further = (i for i in refill_indices(len(self.prompts), step, self.seed) if i not in taken)
            for i in further:
                if len(chosen) == self.prompts_per_step:
                    break
                if self._is_open(i):
                    chosen.append(i)
        used.update(chosen)
        return [self.prompts[i] for i in chosen]

    def _is_open(self, i: int) -> bool:
        return self.prompts[i].index not in self.solved.retired
