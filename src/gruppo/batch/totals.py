"""What a step divides by.

A mean over a step is a sum over micro-batches and ranks only if every one of them divides by the same number.
`Totals` holds those numbers; they are counted over the whole step before its first forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gruppo.batch.segments import Segments
from gruppo.errors import InputError
from gruppo.types import Rollout

Count = int | float | Tensor  # a 0-d tensor where the labels live on a GPU: counting must not make the host wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of one optimizer step, over all micro-batches and all ranks.

    `local_tokens` and `local_share` exist for the one loss whose definition is local (BNPO): the tokens of this
    `forward_backward` call on this rank, and the share of this call among all calls of the step
    (1 / (calls x ranks)). All other aggregations ignore them.

    `step` numbers the optimizer step, so that a loss that draws tokens at random draws others in each.

    `survey` holds what else a loss must know of the whole step, such as the entropy that a fifth of its tokens exceed;
    `loss.survey(...)` makes it.

    >>> a = Totals(sequences=2, tokens=5)
    >>> b = Totals(sequences=1, tokens=4)
    >>> Totals.over([a, b])
    Totals(sequences=3, tokens=9, local_tokens=9, local_share=1.0, step=0, survey=None)
    """

    sequences: Count
    tokens: Count
    local_tokens: Count | None = None
    local_share: float = 1.0
    step: int = 0
    survey: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.local_tokens is None:
            object.__setattr__(self, "local_tokens", self.tokens)

    def number(self, name: str) -> Tensor:
        """A number of the survey, `[]`."""
        if self.survey is None or name not in self.survey:
            raise InputError(
                f"totals hold no {name!r}: this loss looks at the whole step. Make the totals of a step with "
                "loss.survey(...) over all its sequences before the first micro-batch"
            )
        return self.survey[name]

    @classmethod
    def of_step(cls, rollouts: Sequence[Rollout], step: int = 0) -> "Totals":
        """The totals of a step with these rollouts."""
        return cls(sequences=len(rollouts), tokens=sum(r.num_scored for r in rollouts), step=step)

    @classmethod
    def of(cls, segments: Segments) -> "Totals":
        """The totals when this batch is the whole step."""
        return cls(sequences=segments.num_sequences, tokens=segments.length.sum())

    @classmethod
    def over(cls, parts: Iterable["Totals"]) -> "Totals":
        """The totals of a step made of several micro-batches on one rank."""
        parts = list(parts)
        return cls(sequences=sum(p.sequences for p in parts), tokens=sum(p.tokens for p in parts))
