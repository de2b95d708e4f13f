"""Batches for the loss tests, the layouts they can be laid out in, and the seven losses by name."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gruppo.loss import BNPOLoss, CISPOLoss, DAPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss, TruncatedWeight

SEVEN = {
    "GRPO": GRPOLoss,
    "GSPO": GSPOLoss,
    "SAPO": SAPOLoss,
    "CISPO": CISPOLoss,
    "BNPO": BNPOLoss,
    "DRGRPO": DRGRPOLoss,
    "DAPO": DAPOLoss,
}
seven_losses = pytest.mark.parametrize("name", SEVEN)

LAYOUTS = ("padded", "positions [T]", "positions [1, T]", "cu_seqlens [T]", "cu_seqlens [1, T]")
PER_TOKEN = ("logps", "old_logps", "ref_logps", "sampler_logps", "entropies")


def every_term(name: str, **options):
    """The loss with KL, entropy bonus and correction switched on, so that every per-token input matters."""
    options = {"beta": 0.1, "entropy_coef": 0.05, "correction": TruncatedWeight(high=1.5), **options}
    return SEVEN[name](**options)


@dataclass(frozen=True)
class Batch:
    """Padded rows; row i owns its first `slots[i]` slots, the rest is padding."""

    slots: list[int]
    labels: Tensor  # [B, L] int64
    values: dict[str, Tensor]  # PER_TOKEN -> [B, L] float64
    advantages: Tensor  # [B] or [B, L]

    @classmethod
    def random(
        cls,
        slots: list[int],
        mask: list[list[bool]] | None = None,
        seed: int = 0,
        spread: float = 0.4,
        per_token_advantages: bool = False,
    ) -> "Batch":
        """Log-probs around -2 that differ by about `spread`. Without a mask, all slots but a row's first are scored."""
        draw = torch.Generator().manual_seed(seed)
        shape = len(slots), max(slots, default=0)
        normal = lambda size: torch.randn(size, generator=draw, dtype=torch.float64)  # noqa: E731
        if mask is None:
            mask = [[0 < j < n or n == 1 == j + 1 for j in range(shape[1])] for n in slots]
        scored = torch.tensor(mask, dtype=torch.bool).reshape(shape)
        scored &= torch.arange(shape[1]) < torch.tensor(slots).reshape(-1, 1)
        logps = normal(shape) - 2
        values = {name: logps + spread * normal(shape) for name in ("old_logps", "ref_logps", "sampler_logps")}
        values |= {"logps": logps, "entropies": normal(shape).abs()}
        labels = torch.randint(0, 50, shape, generator=draw)
        advantages = normal(shape if per_token_advantages else len(slots))
        return cls(slots, torch.where(scored, labels, -100), values, advantages)

    @property
    def mask(self) -> Tensor:
        return self.labels != -100

    def take(self, rows: list[int]) -> "Batch":
        return Batch(
            [self.slots[i] for i in rows],
            self.labels[rows],
            {name: value[rows] for name, value in self.values.items()},
            self.advantages[rows],
        )

    def leaves(self) -> "Batch":
        """The same batch whose log-probs and entropies collect gradients."""
        fresh = {name: self.values[name].detach().clone().requires_grad_() for name in ("logps", "entropies")}
        return replace(self, values=self.values | fresh)

    def arguments(self, layout: str = "padded", trailing: int = 0) -> tuple[dict, dict, dict]:
        """(inputs, outputs, keywords) of a loss call; `trailing` padding slots end a packed row."""
        values, labels, advantages = self.values, self.labels, self.advantages
        inputs: dict[str, Tensor] = {}
        if layout != "padded":
            values = {name: self._flat(value, 0.0, trailing) for name, value in values.items()}
            labels = self._flat(labels, -100, trailing)
            if advantages.dim() == 2:
                advantages = self._flat(advantages, 0.0, trailing)
            ends = torch.tensor([0, *self.slots]).cumsum(0)
            ends[-1] += trailing
            positions = torch.tensor([j for n in self.slots for j in range(n)] + [0] * trailing)
            inputs = {"cu_seqlens": ends} if layout.startswith("cu_seqlens") else {"position_ids": positions.long()}
            if layout.endswith("[1, T]"):
                values = {name: value[None] for name, value in values.items()}
                labels = labels[None]
                inputs = {name: x[None] if name == "position_ids" else x for name, x in inputs.items()}
        outputs = {name: values[name] for name in ("logps", "entropies")}
        keywords = {name: values[name] for name in ("old_logps", "ref_logps", "sampler_logps")}
        return {"labels": labels, **inputs}, outputs, keywords | {"advantages": advantages}

    def _flat(self, rows: Tensor, fill: float, trailing: int) -> Tensor:
        used = [row[:n] for row, n in zip(rows, self.slots, strict=True)]
        return torch.cat([*used, rows.new_full((trailing,), fill)])


def value_and_grad(loss, batch: Batch, layout: str = "padded", trailing: int = 0, totals=None, **replaced):
    """(loss, gradient of the log-probs, gradient of the entropies), the gradients in the padded layout."""
    batch = batch.leaves()
    inputs, outputs, keywords = batch.arguments(layout, trailing)
    value = loss(inputs, outputs, totals=totals, **(keywords | replaced)).loss
    value.backward()
    zero = torch.zeros_like(batch.values["logps"])
    grads = [zero if batch.values[n].grad is None else batch.values[n].grad for n in ("logps", "entropies")]
    return value.detach(), *grads


def assert_same(got, expected, tolerance: float = 1e-12):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
