"""Learner: optimizer steps on the rollouts of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from gruppo.errors import NumericError
from gruppo.types import Group, Rollout

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gruppo.model.ranked import Actor
    from gruppo.model.transformers_model import Record

MAX_SKIPPED = 3
"""Optimizer steps in a row whose gradient was not finite before the run stops."""


@dataclass(kw_only=True)
class Learner:
    """Trains a model on groups of rollouts: `epochs` passes of `minibatches` optimizer steps."""

    model: "Actor"
    epochs: int = 1
    minibatches: int = 1
    max_grad_norm: float = 1.0
    skipped_in_a_row: int = 0

    def update(
        self, groups: Sequence[Group], tokens: "TokenRecord | None" = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Take the optimizer steps; returns the groups with the log-probs they were trained with, and the metrics.

        While the weights are those that the step began with, an update is on-policy: the old log-probs are the policy's
        own, so the ratio is exactly 1. For updates after the first they are computed before it, by the same code that
        trains.

        Args:
            tokens: collects what each update saw of each token: log-probs, entropies, whether the loss left it out.
        """
        model, version = self.model, self.model.version
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.epochs * self.minibatches > 1:
            rollouts = self.with_logps(rollouts)
        losses: list[dict[str, float]] = []
        norms: list[float] = []
        lr, skipped, rejected, live = 0.0, 0, 0, 0
        for _ in range(self.epochs):
            for part in minibatch_parts(groups, self.minibatches):
                chosen = rollouts[part]
                if model.version == version:
                    chosen = [r if r.old_logps is None else replace(r, old_logps=None) for r in chosen]
                result = model.run(model.plan(chosen), record=None if tokens is None else tokens.of(part.start))
                report = model.clip_grad_and_step(self.max_grad_norm)
                # A term as its mean over tokens: how the loss weighs tokens must not change what a KL of 0.1 means.
                losses.append({n: float(x) for n, x in ({"loss": result.loss} | result.terms | result.means).items()})
                norms += [] if report.grad_norm is None or not isfinite(report.grad_norm) else [report.grad_norm]
                lr = report.lr
                skipped += self._count_skipped(report.skipped, report.culprit)
                rejected += 0 if result.rejected is None else int(result.rejected)
                live += sum(rollout.num_scored for rollout in chosen if rollout.has_advantage)
        # An update on rollouts without signal has no terms.
        names = dict.fromkeys(name for each in losses for name in each)
        metrics = {f"policy/{name}": sum(x.get(name, 0.0) for x in losses) / len(losses) for name in names}
        if norms:
            metrics["optim/grad_norm"] = sum(norms) / len(norms)
        metrics |= {"optim/lr": lr, "optim/skipped": float(skipped)}
        if model.loss.rejects and live:
            metrics["live/rejected_frac"] = rejected / live
        if rollouts:
            metrics["live/frac"] = sum(rollout.has_advantage for rollout in rollouts) / len(rollouts)
        # The model measures on rollouts with an advantage only, and so these numbers are called.
        metrics |= {key.replace("train/", "live/"): x for key, x in model.calculate_metric().items()}
        trained = iter(rollouts)
        return [replace(g, rollouts=tuple(next(trained) for _ in g.rollouts)) for g in groups], metrics

    def with_logps(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts with log-probs of policy and, where the loss needs them, reference, if they have none yet."""
        if rollouts and rollouts[0].old_logps is None:
            rollouts = _with(rollouts, "old_logps", self.model.forward_only(rollouts)["logps"])
        if rollouts and rollouts[0].ref_logps is None and "ref_logps" in self.model.loss.needs:
            rollouts = _with(rollouts, "ref_logps", self.model.reference_logps(rollouts))
        return rollouts

    def _count_skipped(self, skipped: bool, culprit: str | None) -> int:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NumericError(
                f"{MAX_SKIPPED} optimizer steps in a row had a non-finite gradient (first in {culprit}); the weights "
                "are those before them. Lower lr, or look at the completions of the last step"
            )
        return int(skipped)


class TokenRecord:
    """Record of what the updates of a step saw of each token."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], Sequence[int], dict[str, Tensor]]] = []
        """For each micro-batch: the numbers of its rollouts, their lengths, and columns of their tokens."""

    def of(self, first: int) -> "Record":
        """A record for `TransformersModel.run`, for rollouts numbered from `first`."""

        def note(indices: tuple[int, ...], lengths: Sequence[int], columns: "dict[str, Tensor]") -> None:
            self.seen.append(([first + i for i in indices], lengths, columns))

        return note

    def given_to(self, groups: Sequence[Group]) -> "Callable[[], list[Group]]":
        """A function that returns the groups of the step with what the last update of each rollout saw. The numbers are
        on the host when this returns, so the function can run in a thread. Rollouts that were not scored stay
        unchanged."""
        done, last = set[int](), []
        for indices, lengths, columns in reversed(self.seen):
            if not done.issuperset(indices):  # else later updates have seen all of them
                done.update(indices)
                last.append((indices, lengths, {name: _on_host(column) for name, column in columns.items()}))
        return partial(_with_columns, groups, last[::-1])


def _with_columns(groups: Sequence[Group], columns: Sequence[tuple[Any, Any, "dict[str, np.ndarray]"]]) -> list[Group]:
    rollouts = [rollout for group in groups if group.status == "kept" for rollout in group.rollouts]
    for indices, lengths, seen in columns:
        values = {name: column.tolist() for name, column in seen.items()}
        for i, length, end in zip(indices, lengths, accumulate(lengths), strict=True):
            if rollouts[i].num_scored:
                own = {name: tuple(each[end - length : end]) for name, each in values.items()}
                rollouts[i] = replace(rollouts[i], **own)
    given = iter(rollouts)
    return [replace(g, rollouts=tuple(next(given) for _ in g.rollouts)) if g.status == "kept" else g for g in groups]


def _on_host(column: "Tensor") -> "np.ndarray":
    column = column.float() if column.element_size() == 2 else column  # numpy has no bfloat16
    return column.numpy(force=True)


def minibatch_parts(groups: Sequence[Group], minibatches: int) -> list[slice]:
    """Rollouts of each minibatch: whole groups, spread evenly; some are empty if there are too few groups."""
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group.rollouts))
    cuts = [ends[i * len(groups) // minibatches] for i in range(minibatches + 1)]
    return [slice(start, end) for start, end in pairwise(cuts)]


def _with(rollouts: Sequence[Rollout], name: str, rows: Sequence) -> list[Rollout]:
    """Rollouts with log-probs of their sampled tokens; those of a masked rollout are never read."""
    made = []
    for rollout, row in zip(rollouts, rows, strict=True):
        values = tuple(row.tolist()) if len(row) else (0.0,) * rollout.trajectory.num_sampled
        made.append(replace(rollout, **{name: values}))
    return made
