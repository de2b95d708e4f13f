"""What a loss must know of a whole step before its first backward: one scoring pass over all sequences.

Joins `loss.survey`, which takes log-probs, with the model that has them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.batch import Totals, pack
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss import PolicyLoss
from gruppo.types import InputFeature


def survey_step(
    loss: PolicyLoss,
    score: Callable[[Sequence[InputFeature]], dict[str, list[Tensor]]],
    inputs: Sequence[InputFeature],
    *,
    advantages: Any,
    old_logps: Any,
    sampler_logps: Any,
    totals: Totals,
    is_whole_step: bool,
    device: torch.device,
) -> Totals:
    """The totals of the step with the survey of its loss.

    Args:
        score: gives log-probs and entropies without gradient; asked only if the loss surveys the policy.
        is_whole_step: False when `inputs` are a part of it, which is an error unless the totals hold the survey.
    """
    if totals.survey is not None and not loss.draws_tokens:
        return totals
    if not is_whole_step:
        raise InputError(
            f"{type(loss).__name__} looks at all tokens of a step: hand the whole step to one call"
            + ("" if loss.draws_tokens else ", or give totals made by loss.survey(...) over all of it")
        )
    batch = pack(inputs).to(device)
    scored = batch.labels != IGNORE_INDEX
    lengths = batch.segments.length
    outputs = {"logps": torch.zeros(int(scored.sum()), device=device)}
    if loss.surveys_policy and inputs:
        outputs = {name: torch.cat(rows) for name, rows in score(inputs).items()}
    return loss.survey(
        {"labels": batch.labels[scored], "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])},
        outputs,
        advantages=advantages,
        old_logps=batch.old_logps[scored] if old_logps is None and batch.old_logps is not None else old_logps,
        sampler_logps=sampler_logps,
        totals=totals,
    )
