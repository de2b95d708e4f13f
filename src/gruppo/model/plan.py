"""StepPlan: what a step will compute, decided before its first forward.

Which rollouts are live, which share a forward and in which layout, and what the loss divides by. The plan is a function
of the step alone: every rank makes the same one, and the micro-batches are dealt out, idle ones included, so that all
ranks run equally many forwards.

No result depends on the split or the layout; they are for speed and memory. So a layout other than padded rows is
compared with them before its first use.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from gruppo.batch import PackedBatch, Totals, pack, pack_shared, prompt_groups, split_by_tokens, split_padded
from gruppo.batch.microbatch import split_shared
from gruppo.batch.shared import own_slots
from gruppo.kernel.shared_prompt_attention import BLOCK
from gruppo.loss import PolicyLoss
from gruppo.model.attention_hook import refusal
from gruppo.model.logp_model import LogpModel
from gruppo.model.precision import can_widen, in_float32
from gruppo.parallel.ranks import Ranks
from gruppo.types import InputFeature, Prompt, Rollout, Trajectory

logger = logging.getLogger(__name__)

Layout = Literal["auto", "padded", "packed", "shared"]

WORTH_IT = 1.2
"""Share when the estimate says that repeating costs this many times as much."""
SMALL = 1 << 16
"""Slots x hidden size below which a CPU spends more on the bookkeeping than on the slots."""
SHORT_ROW = 64
"""Shorter rows of a masked attention gain nothing."""


def idle(like: Rollout) -> Rollout:
    """A sequence of one slot in which nothing is scored: keeps a rank in step that has no more to compute.

    It has log-probs of the kinds that the others have, so that it needs the same forwards.
    """
    logps = None if like.trajectory.logps is None else ()
    given = {name: None if getattr(like, name) is None else () for name in ("old_logps", "ref_logps")}
    trajectory = Trajectory(prompt=Prompt(token_ids=(0,)), tokens=(), logps=logps)
    return Rollout(trajectory=trajectory, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Micro-batches of this rank, and the totals of the whole step."""

    microbatches: list[PackedBatch]
    totals: Totals
    observed: list[PackedBatch]
    """Sequences without a gradient, for the gap between sampler and trainer."""
    scores_observed: bool
    """Whether those are to be scored: their log-probs are not known yet."""


class Planner:
    """Plans steps and scoring passes for a model.

    Args:
        tokens_per_microbatch: tokens of one forward; None: all at once.
        layout: "auto", "padded", "packed" or "shared".
    """

    def __init__(
        self, logp_model: LogpModel, *, layout: Layout = "auto", tokens_per_microbatch: int | None, ranks: Ranks
    ) -> None:
        self.logp_model = logp_model
        self.layout: Layout = layout
        self.tokens_per_microbatch = tokens_per_microbatch
        self.ranks = ranks
        self.device: torch.device = next(logp_model.model.parameters()).device
        self.hidden_size = hidden_size(logp_model.base)
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
            microbatches = [replace(batch, sequence_ids=torch.tensor(batch.indices)) for batch in microbatches]
        return StepPlan(
            microbatches=microbatches,
            totals=totals,
            observed=self.split(rollouts, skipped),
            scores_observed=any(rollouts[i].old_logps is None for i in skipped),
        )

    def split(self, rollouts: Sequence[Rollout], indices: Sequence[int] | None = None) -> list[PackedBatch]:
        """This rank's micro-batches of the given rollouts, under the budget."""
        indices = range(len(rollouts)) if indices is None else indices
        chosen = [rollouts[i] for i in indices]
        shared = self._shared(chosen)
        in_one_row = bool(chosen) and self.layout == "packed" and self._runs("packed")
        parts = self.ranks.deal(self._parts(chosen, shares=shared is not None, in_one_row=in_one_row), [])
        made = []
        for part in parts:
            members = [chosen[i] for i in part] or [idle(chosen[0])]
            if shared is None or not part:
                batch = pack(members)
            else:
                batch = pack_shared(members, row_slots=shared.row_slots, multiple_of=shared.multiple_of)
            made.append(replace(batch, indices=tuple(indices[i] for i in part), in_one_row=in_one_row))
        return made

    def _shared(self, rollouts: Sequence[Rollout]) -> "SharedLayout | None":
        """The shared-prompt layout, or None if it is disabled, not worthwhile, or unsupported by the model."""
        if self.layout not in ("auto", "shared") or not rollouts or self._can_run is False:
            return None
        trajectories = [rollout.trajectory for rollout in rollouts]
        layout = shared_layout(trajectories, hidden_size=self.hidden_size, is_cuda=self.device.type == "cuda")
        if self.layout == "auto" and layout.saving < WORTH_IT:
            return None
        return layout if self._runs("shared") else None

    def decide(self) -> None:
        """Find now whether the model can run the layout."""
        if self.layout != "padded":
            self._runs("packed" if self.layout == "packed" else "shared")

    def _runs(self, layout: Literal["packed", "shared"]) -> bool:
        """Can the model run the layout that was chosen? Found when it first matters: it costs a few small forwards."""
        if self._can_run is None:
            self._can_run = can_run(self.logp_model, layout)
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


# --- layouts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayout:
    """How to lay out the rows of shared prompts."""

    row_slots: int | None
    """Longest row; None: one row for everything."""
    multiple_of: int
    saving: float
    """Estimated cost of repeating the prompts over that of sharing them."""


def plan_rows(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], *, hidden_size: int, is_cuda: bool
) -> SharedLayout:
    """The rows for these groups, and what they save.

    Flex attention on CUDA visits only what is visible: there cost is slots, in one row. A masked attention forms all
    W x W scores of a row, each of which costs about 1 / (3 x hidden size) of a slot (measured on a CPU, hidden sizes 64
    and 256). There a large group may be cheaper in several rows, with its prompt repeated.

    Args:
        prompts: tokens of each group's prompt.
        completions: of each group, the slots of each of its distinct completions.
    """
    longest = max((p + max(own, default=0) for p, own in zip(prompts, completions, strict=True)), default=1)
    sequences = sum(max(len(own), 1) for own in completions)
    if is_cuda:
        shared = sum(prompts) + sum(sum(own) for own in completions)
        return SharedLayout(row_slots=None, multiple_of=BLOCK, saving=sequences * longest / max(shared, 1))

    def cost(slots: float, length: float) -> float:
        return slots * (1 + length / (3 * hidden_size))

    prompt, own = max(zip(prompts, map(sum, completions), strict=True), key=sum)
    most = max((len(own) for own in completions), default=1)
    parts = [m for m in (1, 2, 4, 8, 16) if m == 1 or 2 * m <= most]
    costs = [cost(m * prompt + own, prompt + own / m) for m in parts]
    best = parts[costs.index(min(costs))]
    row = max(prompt + -(-own // best), SHORT_ROW, longest)
    slots = 0
    for p, group in zip(prompts, completions, strict=True):
        slots += -(-sum(group) // max(row - p, 1)) * p + sum(group) if sum(group) else p
    saving = cost(sequences * longest, longest) / cost(slots, row)
    is_small = sequences * longest * hidden_size < SMALL
    return SharedLayout(row_slots=row, multiple_of=1, saving=min(saving, 1.0) if is_small else saving)


def shared_layout(trajectories: Sequence[Trajectory], *, hidden_size: int, is_cuda: bool) -> SharedLayout:
    """The rows for these sequences; equal ones count once, since no layout computes them twice."""
    distinct = list({(t.prompt_ids, t.tokens[:-1]): t for t in trajectories}.values())
    groups = prompt_groups(distinct)
    prompts = {g: len(t.prompt_ids) for g, t in zip(groups, distinct, strict=True)}
    completions: dict[int, list[int]] = {}
    for group, trajectory in zip(groups, distinct, strict=True):
        completions.setdefault(group, []).append(own_slots(trajectory))
    return plan_rows(list(prompts.values()), list(completions.values()), hidden_size=hidden_size, is_cuda=is_cuda)


def can_run(logp_model: LogpModel, layout: Literal["packed", "shared"]) -> bool:
    """Can this model run that layout? Its class and config may refuse; else a comparison with padded rows decides."""
    reason = refusal(logp_model.base) if layout == "shared" else None
    if reason is None:
        before = getattr(getattr(logp_model.base, "config", None), "_attn_implementation", None)
        try:
            reason = _disagreement(logp_model, layout)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            reason = f"it fails with {type(error).__name__}: {error}"
        if reason is not None and layout == "shared":
            logp_model.base.set_attn_implementation(before)  # type: ignore[operator]  # transformers'
    if reason is not None:
        refused = {"packed": "sequences are not packed into one row", "shared": "prompts are not shared"}[layout]
        logger.warning("%s: %s, since %s; the layout is padded", type(logp_model.base).__name__, refused, reason)
    return reason is None


@torch.no_grad()
def _disagreement(logp_model: LogpModel, layout: Literal["packed", "shared"]) -> str | None:
    """Compare two groups in one row with their sequences in rows of their own.

    What a layout gets wrong, it gets wrong in float32 too, where nothing hides it. As the model runs, in half precision
    or TF32, it is then asked only to be about as far from float32 as padded rows are: on real weights single tokens are
    half a nat off in any layout.
    """
    vocabulary = logp_model.base.config.get_text_config().vocab_size  # type: ignore[union-attr]
    device = next(logp_model.model.parameters()).device
    tokens = [7 * i % vocabulary for i in range(1, 40)]
    features = [
        InputFeature(prompt_ids=tuple(tokens[:9]), completion_ids=tuple(tokens[9:20])),
        InputFeature(prompt_ids=tuple(tokens[3:7]), completion_ids=tuple(tokens[20:30])),
        InputFeature(prompt_ids=tuple(tokens[:9]), completion_ids=tuple(tokens[30:35])),
    ]

    def score(kind: str, multiple_of: int = 1) -> Tensor:
        batch = pack_shared(features, multiple_of=multiple_of) if kind == "shared" else pack(features)
        return logp_model(replace(batch, in_one_row=kind == "packed").to(device))[0]

    rounds, multiple_of = logp_model.is_half or device.type == "cuda", BLOCK if device.type == "cuda" else 1
    with nullcontext() if logp_model.compiled is None else logp_model.compiled.left_out():
        if rounds and not can_widen(logp_model.model):
            return further_off(score(layout, multiple_of), score("padded"), 0.2)
        with in_float32(logp_model.model):  # rows of no whole blocks take the plain masked attention
            reference = score("padded")
            reason = difference(score(layout), reference, 1e-3)
        if reason is not None or not rounds:
            return reason
        own = float((score("padded") - reference).abs().mean())
        return further_off(score(layout, multiple_of), reference, 3 * own + 0.01)


def difference(logps: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """By how much log-probs differ that should be equal; None within the tolerance."""
    gap = float((logps - expected).abs().max())
    return None if gap <= tolerance else f"its log-probs differ by {gap:.2g}"


def further_off(logps: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """The same by the mean: in half precision single tokens are far off in any layout."""
    gap = float((logps - expected).abs().mean())
    return None if gap <= tolerance else f"its log-probs differ by {gap:.2g} on average, more than rounding does"
