"""The rows that a forward runs on: what a step would cost with shared prompts, and which layouts a model can run.

The layout is for speed and memory only; no result depends on it. So a layout other than padded rows is compared with
them before its first use.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gruppo.batch import pack, pack_shared, prompt_groups
from gruppo.batch.shared import own_slots
from gruppo.kernel.shared_prompt_attention import BLOCK
from gruppo.model.attention_hook import refusal
from gruppo.model.scorer import Scorer
from gruppo.types import InputFeature, Trajectory

logger = logging.getLogger(__name__)

Layout = Literal["auto", "padded", "packed", "shared"]

WORTH_IT = 1.2
"""Share when the estimate says that repeating costs this many times as much."""
SMALL = 1 << 16
"""Slots x hidden size below which a CPU spends more on the bookkeeping than on the slots."""
SHORT_ROW = 64
"""Shorter rows of a masked attention gain nothing."""


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
    best = min(parts, key=lambda m: cost(m * prompt + own, prompt + own / m))
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


def can_run(scorer: Scorer, layout: Literal["packed", "shared"]) -> bool:
    """Can this model run that layout? Its class and config may refuse; else a comparison with padded rows decides."""
    reason = refusal(scorer.base) if layout == "shared" else None
    if reason is None:
        before = getattr(getattr(scorer.base, "config", None), "_attn_implementation", None)
        try:
            reason = _disagreement(scorer, layout)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            reason = f"it fails with {type(error).__name__}: {error}"
        if reason is not None and layout == "shared":
            scorer.base.set_attn_implementation(before)  # type: ignore[operator]  # transformers'
    if reason is not None:
        refused = {"packed": "sequences are not packed into one row", "shared": "prompts are not shared"}[layout]
        logger.warning("%s: %s, since %s; the layout is padded", type(scorer.base).__name__, refused, reason)
    return reason is None


@torch.no_grad()
def _disagreement(scorer: Scorer, layout: Literal["packed", "shared"]) -> str | None:
    """Compare two groups in one row with their sequences in rows of their own."""
    vocabulary = scorer.base.config.get_text_config().vocab_size  # type: ignore[union-attr]
    device = next(scorer.model.parameters()).device
    tokens = [7 * i % vocabulary for i in range(1, 40)]
    features = [
        InputFeature(prompt_ids=tuple(tokens[:9]), completion_ids=tuple(tokens[9:20])),
        InputFeature(prompt_ids=tuple(tokens[3:7]), completion_ids=tuple(tokens[20:30])),
        InputFeature(prompt_ids=tuple(tokens[:9]), completion_ids=tuple(tokens[30:35])),
    ]
    padded = pack(features)
    if layout == "packed":
        other = replace(padded, in_one_row=True)
    else:
        other = pack_shared(features, multiple_of=BLOCK if device.type == "cuda" else 1)
    logps, expected = (scorer(batch.to(device))[0] for batch in (other, padded))
    return difference(logps, expected, 0.2 if is_half(scorer) else 1e-3)


def difference(logps: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """By how much log-probs differ that should be equal; None within the tolerance."""
    gap = float((logps - expected).abs().max())
    return None if gap <= tolerance else f"its log-probs differ by {gap:.2g}"


def is_half(scorer: Scorer) -> bool:
    """Are the weights in half precision?"""
    return next(scorer.model.parameters()).element_size() == 2
