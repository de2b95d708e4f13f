"""States that merge: the same result for any split of the data over micro-batches and ranks, to the last bit.

Maxima and top-K merge exactly by themselves. Sums of floats do not: the order of additions shows in the last digits.
Here every value is first rounded to a multiple of 2^-30 (1e-9); float64 then adds such values without any rounding
as long as the total stays below 2^23, so the order cannot show. Beyond that it is ordinary float64 addition.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gruppo.parallel.ranks import gather_over, max_over, sum_over

GRID = 2.0**30


def exact_sum_(values_T: Tensor) -> Tensor:
    """Sum in float64 of values on the grid of 2^-30, `[]`. Uses up the values: they are overwritten."""
    # A float32 times a power of two loses nothing, and rounding it is exact: what is no integer is below 2^23.
    return values_T.mul_(GRID).round_().sum(dtype=torch.float64) / GRID


@dataclass(slots=True)
class State:
    """Everything a metric remembers between `accumulate` and `calculate`; tensors on the data's device."""

    sums: Tensor  # [K] float64
    maxima: Tensor  # [M] float64, -inf when nothing was seen
    top: Tensor  # [k, fields] float64, best first by column 0, -inf where empty; column 1 is the sequence
    num_sequences: int = 0

    @classmethod
    def empty(cls, num_sums: int, num_maxima: int, top_shape: tuple[int, int], device: torch.device) -> "State":
        return cls(
            sums=torch.zeros(num_sums, dtype=torch.float64, device=device),
            maxima=torch.full((num_maxima,), -torch.inf, dtype=torch.float64, device=device),
            top=torch.full(top_shape, -torch.inf, dtype=torch.float64, device=device),
        )

    def see_maxima(self, *values: Tensor) -> None:
        """One tensor per maximum."""
        if values[0].numel():
            self.maxima = torch.maximum(self.maxima, torch.stack([v.amax() for v in values]).to(torch.float64))

    def merge_top(self, rows: Tensor) -> None:
        """Keep the best k of the old rows and the new. The sort is stable: of equal rows the earlier stays."""
        candidates = torch.cat([self.top, rows])
        order = candidates[:, 0].argsort(descending=True, stable=True)
        self.top = candidates[order[: len(self.top)]]

    def reduced(self, groups: list[ProcessGroup]) -> "State":
        """The state of all ranks together; sequences are numbered through in rank order."""
        if not groups:
            return self
        merged = State(sum_over(groups, self.sums), max_over(groups, self.maxima), self.top.clone(), self.num_sequences)
        if len(self.top):
            count = self.top.new_full((1, self.top.shape[1]), self.num_sequences)
            per_rank = gather_over(groups, torch.cat([self.top, count]))
            first_sequence = per_rank[:, -1, 0].cumsum(0) - per_rank[:, -1, 0]
            rows = per_rank[:, :-1].clone()
            rows[..., 1] += first_sequence[:, None]
            merged.top.fill_(-torch.inf)
            merged.merge_top(rows.flatten(0, 1))
        return merged
