"""StepPlan: what a step will compute, decided before its first forward.

Which rollouts are live, which share a forward and in which layout, and what the loss divides by. The plan is a function
of the step alone: every rank makes the same one, and the micro-batches are dealt out, idle ones included, so that all
ranks run equally many forwards. No result depends on the split or the layout; they are for speed and memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from gruppo.batch import PackedBatch, Totals, pack, pack_shared, prompt_groups, split_by_tokens, split_padded
from gruppo.batch.microbatch import split_shared
from gruppo.batch.shared import own_slots
from gruppo.loss import PolicyLoss
from gruppo.model.layout import WORTH_IT, Layout, SharedLayout, can_run, shared_layout
from gruppo.model.scorer import Scorer
from gruppo.parallel.ranks import Ranks
from gruppo.types import Prompt, Rollout, Trajectory

IDLE = Rollout(trajectory=Trajectory(prompt=Prompt(token_ids=(0,)), tokens=()))
"""A sequence of one slot in which nothing is scored: keeps a rank in step that has no more to compute."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that share a forward."""

    indices: tuple[int, ...]
    """Which rollouts of the step they are."""
    batch: PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Micro-batches of this rank, and the totals of the whole step."""

    microbatches: list[MicroBatch]
    totals: Totals
    observed: list[MicroBatch]
    """Sequences without a gradient that are scored all the same, for the gap between sampler and trainer."""


class Planner:
    """Plans steps and scoring passes for a model.

    Args:
        tokens_per_microbatch: tokens of one forward; None: all at once.
        layout: "auto", "padded", "packed" or "shared".
    """

    def __init__(
        self, scorer: Scorer, *, layout: Layout = "auto", tokens_per_microbatch: int | None, ranks: Ranks
    ) -> None:
        self.scorer = scorer
        self.layout: Layout = layout
        self.tokens_per_microbatch = tokens_per_microbatch
        self.ranks = ranks
        self.device: torch.device = next(scorer.model.parameters()).device
        self.hidden_size = hidden_size(scorer.base)
        self._can_run: bool | None = None

    def step(
        self, rollouts: Sequence[Rollout], loss: PolicyLoss, totals: Totals, *, measures_gap: bool = True
    ) -> StepPlan:
        """The plan of a step. Rollouts whose gradient is exactly 0 count in the totals and are left out otherwise.

        Args:
            measures_gap: score them even so where they have the sampler's log-probs.
        """
        live, skipped = list(range(len(rollouts))), []
        if loss.is_zero_without_advantage:
            live = [i for i, rollout in enumerate(rollouts) if rollout.has_advantage]
            skipped = [i for i, r in enumerate(rollouts) if not r.has_advantage and r.num_scored]
        if not measures_gap or not skipped or rollouts[skipped[0]].trajectory.logps is None:
            skipped = []
        microbatches = self.split(rollouts, live)
        if loss.draws_tokens:
            microbatches = [
                replace(m, batch=replace(m.batch, sequence_ids=torch.tensor(m.indices))) for m in microbatches
            ]
        return StepPlan(microbatches=microbatches, totals=totals, observed=self.split(rollouts, skipped))

    def split(self, rollouts: Sequence[Rollout], indices: Sequence[int] | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of the given rollouts, under the budget."""
        indices = range(len(rollouts)) if indices is None else indices
        chosen = [rollouts[i] for i in indices]
        shared = self._shared(chosen)
        in_one_row = bool(chosen) and self.layout == "packed" and self._runs("packed")
        parts = self.ranks.deal(self._parts(chosen, shares=shared is not None, in_one_row=in_one_row), [])
        made = []
        for part in parts:
            members = [chosen[i] for i in part] or [IDLE]
            if shared is None or not part:
                batch = replace(pack(members), in_one_row=in_one_row)
            else:
                batch = pack_shared(members, row_slots=shared.row_slots, multiple_of=shared.multiple_of)
            made.append(MicroBatch(tuple(indices[i] for i in part), batch))
        return made

    def _shared(self, rollouts: Sequence[Rollout]) -> SharedLayout | None:
        """The shared-prompt layout, or None if it is disabled, not worthwhile, or unsupported by the model."""
        if self.layout not in ("auto", "shared") or not rollouts or self._can_run is False:
            return None
        trajectories = [rollout.trajectory for rollout in rollouts]
        layout = shared_layout(trajectories, hidden_size=self.hidden_size, is_cuda=self.device.type == "cuda")
        if self.layout == "auto" and layout.saving < WORTH_IT:
            return None
        return layout if self._runs("shared") else None

    def _runs(self, layout: Literal["packed", "shared"]) -> bool:
        """Can the model run the layout that was chosen? Found when it first matters: it costs two small forwards."""
        if self._can_run is None:
            self._can_run = can_run(self.scorer, layout)
        return self._can_run

    def _parts(self, rollouts: Sequence[Rollout], *, shares: bool, in_one_row: bool) -> list[list[int]]:
        budget = self.tokens_per_microbatch
        if budget is None:
            return [list(range(len(rollouts)))] if rollouts else []
        trajectories = [rollout.trajectory for rollout in rollouts]
        if shares:
            prompts, own = [len(t.prompt_ids) for t in trajectories], [own_slots(t) for t in trajectories]
            return split_shared(prompt_groups(trajectories), prompts, own, budget)
        lengths = [max(len(t.prompt_ids) + len(t.tokens) - 1, 1) for t in trajectories]
        return (split_by_tokens if in_one_row else split_padded)(lengths, budget)


def hidden_size(model: nn.Module) -> int:
    """By the config; 1024 where it does not say, which only moves an estimate."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    return int(getattr(text, "hidden_size", 0) or 1024)
