"""The loss and its gradients through the head in one walk: hidden states in, d_hidden and d_weight out.

Joins `kernel/head.py`, which knows no loss, with `loss/`, which knows no logits. The head asks for dL/dlogp of each
window; here the loss answers, as the same plain PyTorch that it is everywhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gruppo.batch import PackedBatch, Totals
from gruppo.kernel.head import Head, HeadResult
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.model.forward import Scorer, place


@dataclass(slots=True)
class _Answers:
    """Answers the head's questions and adds up what the loss says of each window."""

    loss: PolicyLoss
    make_inputs: Callable[[], LossInputs]
    total: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    rejected: Tensor | None = None
    aligned: LossInputs | None = None

    @property
    def inputs(self) -> LossInputs:
        """Made at the first question, while the GPU is busy with the first window's product."""
        if self.aligned is None:
            self.aligned = self.make_inputs()
        return self.aligned

    def __call__(self, rows: slice, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        logps = logps.detach().requires_grad_()
        wants_entropy = self.loss.entropy_coef != 0
        entropies = entropies.detach().requires_grad_(wants_entropy)
        output = self.loss.compute(self.inputs.window(rows, logps, entropies))
        wanted = (logps, entropies) if wants_entropy else (logps,)
        grads = torch.autograd.grad(output.loss, wanted, allow_unused=True)
        self.total = self.total + output.loss.detach()
        for name, value in output.terms.items():
            self.terms[name] = self.terms.get(name, 0) + value
        if output.rejected is not None:
            self.rejected = output.rejected if self.rejected is None else self.rejected + output.rejected
        grad_logps = torch.zeros_like(logps) if grads[0] is None else grads[0]
        return grad_logps, grads[1] if wants_entropy else None


def loss_and_backward(
    scorer: Scorer, batch: PackedBatch, loss: PolicyLoss, totals: Totals, aligned: dict[str, Any]
) -> tuple[LossOutput, dict[str, Tensor]]:
    """The loss of a micro-batch, its gradient added to the parameters, and the log-probs and entropies it saw.

    Args:
        aligned: advantages, old_logps, ref_logps and sampler_logps of the batch's sequences.
    """
    if not scorer.walks(batch.num_slots):
        outputs = scorer(batch)
        result = loss(batch.loss_inputs(), outputs, totals=totals, **aligned)
        result.loss.backward()
        return result, outputs
    hidden, labels, scored = scorer.hidden(batch)
    assert scorer.output is not None
    lengths = batch.segments.length
    head = scorer.make_head()

    def make_inputs() -> LossInputs:
        per_token: dict[str, Any] = {name: v[scored] if isinstance(v, Tensor) and v.shape == batch.labels.shape else v
                     for name, v in aligned.items()}  # fmt: skip
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        blank = torch.zeros(len(labels), dtype=head.dtype, device=labels.device)
        inputs = {"labels": labels, "cu_seqlens": offsets, "sequence_ids": batch.sequence_ids}
        return loss.align(inputs, {"logps": blank}, totals=totals, **per_token)

    output, result = loss_through_head(
        head,
        hidden.detach(),
        labels,
        loss,
        make_inputs,
        lengths=None if loss.is_per_token else lengths.tolist(),
        needs_weight=scorer.output.is_trained,
    )
    if hidden.requires_grad:
        hidden.backward(result.d_hidden)
    if result.d_weight is not None:
        scorer.output.add_gradient(result.d_weight)
    seen = {"logps": place(result.logps, scored, batch), "entropies": place(result.entropies, scored, batch)}
    return output, seen


def loss_through_head(
    head: Head,
    hidden: Tensor,  # [N, D] without graph
    labels: Tensor,  # [N] int64
    loss: PolicyLoss,
    make_inputs: Callable[[], LossInputs],
    *,
    lengths: list[int] | None,
    needs_weight: bool,
) -> tuple[LossOutput, HeadResult]:
    """The loss of a micro-batch and the gradients of its head.

    Args:
        make_inputs: gives the inputs, aligned over the N scored tokens; their `logps` are not read.
        lengths: scored tokens of each sequence; None when the loss looks at single tokens only.
        needs_weight: False when the head is frozen.
    """
    answers = _Answers(loss, make_inputs, torch.zeros((), dtype=head.dtype, device=hidden.device))
    result = head.train(
        hidden,
        labels,
        answers,
        lengths=lengths,
        needs_weight=needs_weight,
        entropy_gradient=loss.entropy_coef != 0,
    )
    output = LossOutput(
        loss=answers.total, terms=answers.terms, on_policy=answers.inputs.on_policy, rejected=answers.rejected
    )
    return output, result
