"""Advantages of a step: penalties come off the rewards, then an estimator compares the rollouts of each group.

A penalty is what `RewardShape` takes for length and truncation, plus the KL to the reference times its coefficient.
Where it acts depends on what the estimator compares:

    sums of rewards (most)    in the sum: r_i + penalty_i
    rewards apart (GDPO)      in the column of the reward that decides correctness, as penalty_i / weight; of the first
                              where none decides
    right and wrong alone     after the comparison: A_i + penalty_i - mean of the group's penalties, and
    (pass@k, GRPO-LEAD)       `truncated_factor` on a positive A_i: it is a discount on being right

Which answers are right is never judged by a penalised number: `Rollout.correct` says it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING, Any

from gruppo.advantage import Advantage, Groups
from gruppo.reward import RewardShape
from gruppo.types import Group, Rollout

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor

FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageAssigner:
    """The estimator of a run with the penalties that come before it."""

    estimate: Advantage
    shape: RewardShape
    weights: Mapping[str, float]
    """Weight of each reward function."""
    correct_by: str | None
    """The reward that decides correctness; None: none does."""
    scale: str | None = None
    mask_truncated: bool = False
    """Train on no token of a truncated rollout. It still counts in the mean of its group."""

    def has_signal(self, groups: Sequence[Group]) -> list[bool]:
        """Whether each group teaches something: the estimator gives it an advantage on its rewards as they are."""
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        advantages = iter(self._estimate(groups, rewards, rewards))
        return [any([next(advantages) != 0 for _ in group.rollouts]) for group in groups]

    def assign(self, groups: Sequence[Group], kl_coef: float = 0.0) -> list[Group]:
        """The groups with shaped rewards and advantages.

        Args:
            kl_coef: coefficient of the KL to the reference. Above 0 the rollouts need `old_logps` and `ref_logps`.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        shaped = rewards = [rollout.reward for rollout in rollouts]
        if kl_coef or not self.shape.does_nothing:
            shaped = [self._shaped(rollout, kl_coef) for rollout in rollouts]
        numbers = zip(shaped, self._estimate(groups, rewards, shaped), strict=True)
        assigned = []
        for group in groups:
            members = []
            for rollout in group.rollouts:
                value, advantage = next(numbers)
                is_masked = rollout.trajectory.is_lost or (self.mask_truncated and rollout.trajectory.is_truncated)
                members.append(replace(rollout, shaped=value, advantage=advantage, is_masked=is_masked))
            assigned.append(replace(group, rollouts=tuple(members)))
        return assigned

    def _shaped(self, rollout: Rollout, kl_coef: float) -> float | None:
        sequence = rollout.trajectory
        reward = self.shape.one(rollout.reward, sequence.num_sampled, sequence.is_truncated)
        return reward if reward is None or not kl_coef else reward - kl_coef * kl_to_reference(rollout)

    def _estimate(
        self, groups: Sequence[Group], rewards: Sequence[float | None], shaped: Sequence[float | None]
    ) -> list[float]:
        """One advantage per rollout, groups one after the other, for its reward without and with penalties."""
        if not rewards:
            return []
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        ids = [i for i, group in enumerate(groups) for _ in group.rollouts]
        options: dict[str, Any] = {}
        wanted = (*getattr(self.estimate, "needs", ()), *getattr(self.estimate, "uses", ()))
        if "lengths" in wanted:
            options["lengths"] = [rollout.trajectory.num_sampled for rollout in rollouts]
        if "greedy_rewards" in wanted:
            options["greedy_rewards"] = [self._greedy(group) for group in groups for _ in group.rollouts]
        if "correct" in wanted and self.correct_by is not None:
            options["correct"] = [rollout.correct for rollout in rollouts]
        if self.scale is not None:
            options["scale"] = self.scale
        if getattr(self.estimate, "per_reward", False):
            compared: Sequence[Any] = [self._columns(*each) for each in zip(rollouts, rewards, shaped, strict=True)]
            return self.estimate(compared, group_ids=ids, **options).tolist()
        if getattr(self.estimate, "judges_answers", False) and shaped is not rewards:
            return self._after(rollouts, shaped, ids, self.estimate(rewards, group_ids=ids, **options).tolist())
        return self.estimate(shaped, group_ids=ids, **options).tolist()

    def _columns(self, rollout: Rollout, reward: float | None, shaped: float | None) -> list[float | None]:
        """The rewards apart, with the penalty in the column of the one that decides correctness."""
        column = self.correct_by
        if column is None or not self.weights[column]:
            column = next(name for name, weight in self.weights.items() if weight)
        values = dict(rollout.rewards)
        value = values[column]
        if value is not None and reward is not None and shaped is not None:
            values[column] = value + (shaped - reward) / self.weights[column]
        return [values[name] for name in self.weights]

    def _after(
        self,
        rollouts: Sequence[Rollout],
        shaped: Sequence[float | None],
        ids: Sequence[int],
        advantages: Sequence[float],
    ) -> list[float]:
        """Advantages of a comparison of right and wrong, with the penalties behind it."""
        factor = 1.0 if self.shape.truncated_factor is None else self.shape.truncated_factor
        penalties, scaled = [], []
        for rollout, reward, advantage in zip(rollouts, shaped, advantages, strict=True):
            scaled.append(advantage * factor if rollout.trajectory.is_truncated and advantage > 0 else advantage)
            discounted = self.shape.discounted(rollout.reward, rollout.trajectory.is_truncated)
            penalties.append(None if reward is None or discounted is None else reward - discounted)
        penalty = Groups.read(penalties, 1, ids, "group")
        return [a + p for a, p in zip(scaled, penalty.result(penalty.centered()).tolist(), strict=True)]

    def _greedy(self, group: Group) -> float | None:
        return None if group.greedy is None else self._shaped(group.greedy, kl_coef=0.0)


def kl_to_reference(rollout: Rollout) -> float:
    """Log-ratio of a completion to the reference, summed over its tokens; exactly 0 where rounding explains it.

    Both log-probs are the trainer's own: with the sampler's, the gap between two engines would count as KL.
    """
    old, reference = rollout.old_logps, rollout.ref_logps
    assert old is not None and reference is not None, "the trainer scores rollouts before it takes their KL"
    kl = fsum(old) - fsum(reference)
    rounding = 4 * FLOAT32_EPS * (fsum(map(abs, old)) + fsum(map(abs, reference)))
    return 0.0 if abs(kl) <= rounding else kl


def with_kl(groups: Sequence[Group], model: "Actor") -> tuple[list[Group], dict[str, float]]:
    """The groups with the log-probs of policy and reference, both by the code that trains, and the mean KL.

    Equal completions of a group get the same numbers, whichever forward they came from.
    """
    rollouts = {_content(r): r for g in groups for r in g.rollouts}
    policy = model.forward_only(list(rollouts.values()))["logps"]
    reference = model.reference_logps(list(rollouts.values()))
    pairs = ((tuple(p.tolist()), tuple(r.tolist())) for p, r in zip(policy, reference, strict=True))
    logps = dict(zip(rollouts, pairs, strict=True))
    scored = []
    for group in groups:
        found = [logps[_content(rollout)] for rollout in group.rollouts]
        members = zip(group.rollouts, found, strict=True)
        scored.append(replace(group, rollouts=tuple(replace(r, old_logps=o, ref_logps=f) for r, (o, f) in members)))
    kls = [kl_to_reference(r) for group in scored for r in group.rollouts if not r.trajectory.is_lost]
    return scored, {"reward/kl": fsum(kls) / max(len(kls), 1)}


def _content(rollout: Rollout) -> tuple[Any, ...]:
    """What decides the log-probs of a rollout's sampled tokens."""
    return rollout.trajectory.prompt_ids, rollout.trajectory.tokens, rollout.trajectory.sampled


def shaped_mean(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of the rewards as they were compared."""
    shaped = [r.shaped for group in groups for r in group.rollouts if r.shaped is not None]
    return {"reward/shaped_mean": fsum(shaped) / len(shaped)} if shaped else {}
