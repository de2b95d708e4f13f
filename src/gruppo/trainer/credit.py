"""From rewards to advantages: shape them, take off the KL, compare; and what later steps must know of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gruppo.advantage import Advantage
from gruppo.reward.shape import RewardShape
from gruppo.sampler.params import SamplingParams
from gruppo.trainer.collect import (
    Collected,
    ScoredGroup,
    estimate_advantages,
    make_groups,
    rollout_metrics,
    shaped_rewards,
)
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.memory import Memory
from gruppo.trainer.reward_kl import sequence_kl
from gruppo.trainer.rounds import Gatherer, Rounds

if TYPE_CHECKING:
    from gruppo.model import TransformersModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Gives the groups of a step their advantages."""

    config: TrainConfig
    estimate: Advantage
    shape: RewardShape
    model: "TransformersModel"
    gatherer: Gatherer
    memory: Memory

    def give(self, rounds: Rounds, number: int, params: SamplingParams) -> Collected:
        """The kept groups with their advantages, and the metrics of all that was sampled."""
        groups, metrics = rounds.kept, rounds.metrics
        rewards = shaped_rewards(groups, self.shape)
        if self.config.kl_in_reward:
            kls = sequence_kl([s for g in groups for s in g.sequences], self.model)
            coefficient = self.memory.kl.coefficient
            rewards = [None if r is None else r - coefficient * kl for r, kl in zip(rewards, kls, strict=True)]
            metrics |= {"reward/kl": sum(kls) / max(len(kls), 1), "reward/kl_coef": coefficient}
        advantages = estimate_advantages(
            groups,
            rewards,
            self.estimate,
            scale=self.config.scale,
            greedy_rewards=self._greedy_rewards(groups, number, params),
            is_shaped=not self.shape.does_nothing,
        )
        made = make_groups(groups, rewards, advantages)
        dropped = [r for g in rounds.dropped for r in g.rewards]
        metrics |= rollout_metrics((*made, *make_groups(rounds.dropped, dropped, [0.0] * len(dropped))))
        if self.config.kl_in_reward or not self.shape.does_nothing:
            compared = [r for r in rewards if r is not None]
            metrics["reward/shaped_mean"] = sum(compared) / max(len(compared), 1)
        if self.config.dynamic_sampling:
            metrics |= rounds.counts
        return Collected(groups=made, metrics=metrics)

    def remember(self, rounds: Rounds, number: int, metrics: dict[str, float]) -> None:
        """What the next steps depend on besides the weights. After the update: a stopped step leaves no trace."""
        config, memory = self.config, self.memory
        if config.retire_solved:
            memory.solved.see([(g.prompt.index, g.rewards) for g in rounds.groups], config.correct_at)
            metrics["dynamic/prompts_retired"] = float(len(memory.solved.retired))
        if config.kl_in_reward:
            memory.kl.follow(metrics["reward/kl"], sum(len(g.sequences) for g in rounds.kept))
        if memory.entropy.rule is not None and "train/entropy" in metrics:
            metrics["policy/entropy_coef"] = memory.entropy.applied
            memory.entropy.follow(metrics["train/entropy"])
        if memory.reference is not None and number % config.ref_every == 0:
            memory.reference.refresh(config.ref_mix)

    def _greedy_rewards(
        self, groups: list[ScoredGroup], number: int, params: SamplingParams
    ) -> list[float | None] | None:
        if "greedy_rewards" not in getattr(self.estimate, "needs", ()) or not groups:
            return None
        alone = shaped_rewards(self.gatherer.greedy(groups, number, params), self.shape)
        return [reward for group, reward in zip(groups, alone, strict=True) for _ in group.sequences]
