"""What a loss counts over the whole step before its first backward, and the weight of a token that follows."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gruppo.batch.segments import Segments
from gruppo.loss.inputs import LossInputs

if TYPE_CHECKING:
    from gruppo.loss.policy import PolicyLoss


@torch.no_grad()
def surveyed(loss: "PolicyLoss", inputs: LossInputs) -> LossInputs:
    """The inputs of a whole step, whose totals hold what the parts found, and how much was rejected."""
    loss.check_needs(inputs, besides=frozenset({"ref_logps"}))
    log_ratio_T = loss.level(inputs)
    numbers: dict[str, Tensor] = {}
    for part in loss.parts:
        if hasattr(part, "survey"):
            numbers |= part.survey(log_ratio_T, inputs)
    if loss.nll_coef:
        numbers["positive_tokens"] = inputs.segments.sum((inputs.advantages > 0).to(inputs.logps.dtype)).sum()
    inputs = replace(inputs, totals=replace(inputs.totals, survey=numbers))
    if loss.rejected == "left_out":
        correction_T = None if loss.correction is None else loss.correction(inputs)
        segments, left = inputs.segments, _left(loss, inputs, log_ratio_T, correction_T)
        numbers["rejected_tokens"] = segments.length.sum() - left.length.sum()
        numbers["rejected_sequences"] = ((segments.length > 0) & (left.length == 0)).sum()
    return inputs


def token_weights(loss: "PolicyLoss", inputs: LossInputs, log_ratio_T: Tensor, correction_T: Tensor | None) -> Tensor:
    """The weight of each token, `[T]`; exactly 0 where nothing is scored, or where it is left out."""
    segments, totals = inputs.segments, inputs.totals
    if loss.rejected == "left_out":
        segments = _left(loss, inputs, log_ratio_T, correction_T)
        totals = replace(
            totals,
            sequences=totals.sequences - totals.number("rejected_sequences"),
            tokens=totals.tokens - totals.number("rejected_tokens"),
        )
    weight_S = loss.aggregate(segments, totals).to(inputs.logps.dtype)
    return segments.keep_(segments.spread(weight_S))


def rejected_tokens(loss: "PolicyLoss", inputs: LossInputs, log_ratio_T: Tensor, correction_T: Tensor | None) -> Tensor:
    """How many scored tokens with an advantage the correction or the selection rejects, `[]`."""
    live = inputs.segments.restricted(inputs.advantages != 0)
    left = _left(loss, replace(inputs, segments=live), log_ratio_T.detach(), correction_T)
    # Counted in the window's own slots: `length` of a window is that of whole sequences.
    return (live.bits != 0).sum() - (left.bits != 0).sum()


def _left(loss: "PolicyLoss", inputs: LossInputs, log_ratio_T: Tensor, correction_T: Tensor | None) -> Segments:
    """The sequences without the tokens that correction or selection reject."""
    segments = inputs.segments
    if correction_T is not None:
        segments = segments.restricted(correction_T != 0)
    keep = getattr(loss.select, "keep", None)
    return segments if keep is None else segments.restricted(keep(log_ratio_T, inputs))
