"""Advantages for the groups of a step: log-probs for a KL penalty where there is one, the estimator, masks."""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import TYPE_CHECKING

from gruppo.trainer.advantages import AdvantageStage, kl_to_reference
from gruppo.types import Group, Rollout

if TYPE_CHECKING:
    from gruppo.model import TransformersModel


def assign_advantages(
    groups: Sequence[Group],
    stage: AdvantageStage,
    model: "TransformersModel",
    *,
    kl_coef: float | None = None,
    mask_truncated: bool = False,
) -> tuple[list[Group], dict[str, float]]:
    """The groups with their advantages, and what was measured on the way.

    Args:
        kl_coef: coefficient of the KL to the reference that comes off the rewards; None: none does.
        mask_truncated: train on no token of a truncated rollout. It still counts in the mean of its group.
    """
    metrics: dict[str, float] = {}
    if kl_coef is not None:
        groups = _with_logps(groups, model)
        kls = [kl_to_reference(rollout) for group in groups for rollout in group.rollouts]
        metrics |= {"reward/kl": fsum(kls) / max(len(kls), 1), "reward/kl_coef": kl_coef}
    assigned = stage.assign(groups, kl_coef or 0.0)
    if kl_coef is not None or not stage.shape.does_nothing:
        shaped = [r.shaped for group in assigned for r in group.rollouts if r.shaped is not None]
        if shaped:
            metrics["reward/shaped_mean"] = fsum(shaped) / len(shaped)
    return [_masked(group) for group in assigned] if mask_truncated else assigned, metrics


def _with_logps(groups: Sequence[Group], model: "TransformersModel") -> list[Group]:
    """The groups with the log-probs of policy and reference, both by the code that trains.

    Equal completions of a group get the same numbers, whichever forward they came from.
    """
    rollouts = {(g.prompt.index, r.trajectory.tokens): r for g in groups for r in g.rollouts}
    policy = model.forward_only(list(rollouts.values()))["logps"]
    reference = model.reference_logps(list(rollouts.values()))
    pairs = ((tuple(p.tolist()), tuple(r.tolist())) for p, r in zip(policy, reference, strict=True))
    scored = dict(zip(rollouts, pairs, strict=True))

    def scored_rollout(group: Group, rollout: Rollout) -> Rollout:
        old, ref = scored[group.prompt.index, rollout.trajectory.tokens]
        return replace(rollout, old_logps=old, ref_logps=ref)

    return [replace(g, rollouts=tuple(scored_rollout(g, r) for r in g.rollouts)) for g in groups]


def _masked(group: Group) -> Group:
    return replace(group, rollouts=tuple(replace(r, is_masked=r.trajectory.is_truncated) for r in group.rollouts))
