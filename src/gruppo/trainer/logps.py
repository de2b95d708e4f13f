"""Log-probs of rollouts under policy and reference, before a step: for a KL penalty in the reward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gruppo.types import Group, Rollout

if TYPE_CHECKING:
    from gruppo.model import TransformersModel


def with_logps(groups: Sequence[Group], model: "TransformersModel") -> list[Group]:
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
