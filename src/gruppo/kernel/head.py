"""The head: hidden states -> log-probs -> loss -> gradients, without ever holding a [N, V] tensor.

Walks over scored tokens in windows. The gradient of any loss with respect to a row of logits is a *direction*, which
does not depend on the loss, times dL/dlogp, a number. So a window's logits are gone before the loss is asked for that
number; it is asked once per window, in plain PyTorch, as any composition of parts, and two products finish the window:

    d_hidden = factor * (direction @ weight),      d_weight += direction.T @ (factor * hidden)

Nothing is computed twice: 6NDV operations trained, 4NDV with a frozen weight. Three ways to get directions:

    triton_logits   bf16 on a GPU: softmax in the epilogue of the product, the logits never reach memory
    triton_rows     on a GPU: float32 logits of a chunk, then row kernels; also for losses with a gradient through the
                    entropy, whose direction depends on the loss, and for log-probs below -80
    rows            anywhere: the same in torch operations

A loss that looks at whole sequences gets windows that end at sequence boundaries; if a sequence is longer than a
window, a first pass computes all log-probs and the loss is asked once.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.kernel import rows as torch_rows
from gruppo.kernel.reference import at_least_float32, check_head, check_temperature
from gruppo.kernel.rows import LogitShape
from gruppo.kernel.sizes import CPU_SCRATCH, GPU_SCRATCH, PRODUCT_ROWS, sizes

if TYPE_CHECKING:
    from gruppo.kernel.triton_logits import RowStats

logger = logging.getLogger(__name__)

Ask = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, logps, entropies) -> (dL/dlogp, dL/dentropy or None), each one number per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    logps: Tensor  # [N] float32
    entropies: Tensor  # [N] float32
    d_hidden: Tensor  # [N, D] in the dtype of the hidden states
    d_weight: Tensor | None  # [V, D] float32; None when frozen


class Head:
    """Scores tokens and takes gradients through `logits = hidden @ weight.T`.

    Args:
        weight: `[V, D]`, bf16 or float32.
        shape: temperature, scale, soft cap, padding columns.
        scratch_bytes: memory for logits and directions, whatever the number of tokens.
        route: "logits", "triton" or "torch" (see above); None: the fastest there is.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        shape: LogitShape | None = None,
        scratch_bytes: int | None = None,
        route: str | None = None,
    ) -> None:
        self.shape = shape or LogitShape()
        check_temperature(self.shape.temperature)
        if weight.dim() != 2:
            raise InputError(f"weight must be [V, D], got {tuple(weight.shape)}")
        self.weight = weight
        self.dtype = at_least_float32(weight[:0]).dtype  # of logits and log-probs
        # On a GPU the tensor cores multiply bf16 into float32; elsewhere the weight is brought to float32 once.
        self.is_mixed = weight.is_cuda and weight.dtype == torch.bfloat16
        self.factor = weight if self.is_mixed else weight.to(self.dtype)
        self.route = route or best_route(weight)
        self.rows = _row_operations(self.route)
        self.sizes = sizes(
            len(weight),
            scratch_bytes or (GPU_SCRATCH if weight.is_cuda else CPU_SCRATCH),
            logit_bytes=_bytes(self.dtype),
            direction_bytes=_bytes(self.factor.dtype),
            route=self.route,
        )

    def windows(
        self, num_rows: int, lengths: Sequence[int] | None = None, size: int | None = None
    ) -> list[slice] | None:
        """Windows over the rows. With `lengths` they end at sequence boundaries; None when a sequence is too long."""
        size = size or self.sizes.window
        if lengths is None:
            return [slice(a, min(a + size, num_rows)) for a in range(0, num_rows, size)]
        if any(n > size for n in lengths):
            return None
        bounds, end = [0], 0
        for n in lengths:
            if end + n - bounds[-1] > size:
                bounds.append(end)
            end += n
        return [slice(a, b) for a, b in pairwise([*bounds, end]) if b > a]

    @torch.no_grad()
    def score(self, hidden: Tensor, labels: Tensor, windows: Iterable[slice] | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[N]`; with the same windows bit for bit those of `train`."""
        self._check(hidden, labels)
        windows = list(windows or self.windows(len(labels)) or [])
        if self.route == "logits":
            stats = self._one_pass(hidden, labels, windows)
            if not windows or not bool(stats.overflowed):
                return stats.logps, stats.entropies
        logps, entropies = self._empty(len(labels))
        x = self._buffer(min(self.sizes.chunk, len(labels)), self.dtype)
        for part in (p for w in windows for p in _pieces(w, self.sizes.chunk)):
            logps[part], entropies[part] = self.rows.stats(self._product(hidden[part], x), labels[part], self.shape)
        return logps, entropies

    @torch.no_grad()
    def train(
        self,
        hidden: Tensor,  # [N, D]
        labels: Tensor,  # [N] int64, all scored
        ask: Ask,
        *,
        lengths: Sequence[int] | None = None,
        needs_weight: bool = True,
        entropy_gradient: bool = False,
    ) -> HeadResult:
        """Log-probs, entropies and the gradients of the loss that `ask` stands for.

        Args:
            ask: called with the rows of each window, in order; runs in plain PyTorch.
            lengths: rows of each sequence, when the loss looks at whole sequences.
            needs_weight: False when the weight is frozen: its product is not computed.
            entropy_gradient: True when the loss has a gradient through the entropies.
        """
        self._check(hidden, labels)
        size = self.sizes.entropy_window if entropy_gradient else self.sizes.window
        windows = self.windows(len(labels), lengths, size)
        if windows is None:  # a sequence longer than a window: all log-probs first, then the loss once
            windows = self.windows(len(labels), None, size) or []
            ask = _asked_at_once(ask, *self.score(hidden, labels, windows), len(labels))
        walk = _Walk(self, hidden, labels, ask, needs_weight)
        longest = max((w.stop - w.start for w in windows), default=0)
        if entropy_gradient:
            walk.with_entropy(windows, longest)
        elif self.route != "logits":
            walk.in_chunks(windows, longest)
        elif not walk.in_one_pass(windows, longest):
            logger.info("a scored token has a log-prob below -80: the head takes the slower, exact route")
            walk = _Walk(self, hidden, labels, ask, needs_weight)
            walk.in_chunks(self.windows(len(labels), lengths) or windows, longest)
        return HeadResult(logps=walk.logps, entropies=walk.entropies, d_hidden=walk.d_hidden, d_weight=walk.d_weight)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _one_pass(self, hidden: Tensor, labels: Tensor, windows: Sequence[slice]) -> "RowStats":
        """Log-probs and entropies without directions."""
        from gruppo.kernel.triton_logits import RowStats, logits_pass

        stats = RowStats.empty(len(labels), hidden.device)
        for window in windows:
            logits_pass(hidden[window], self.weight, labels[window], self.shape, stats[window], None)
        return stats

    def _product(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Float32 logits before shape, into the buffer."""
        out = buffer[: len(hidden)]
        if self.is_mixed:
            return torch.mm(hidden, self.factor.T, out_dtype=torch.float32, out=out)  # type: ignore[call-overload]
        return torch.mm(hidden.to(self.dtype), self.factor.T, out=out)

    def _mm(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right, out_dtype=torch.float32) if self.is_mixed else left @ right  # type: ignore[call-overload]

    def _buffer(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, len(self.weight), dtype=dtype, device=self.weight.device)

    def _empty(self, num_rows: int) -> tuple[Tensor, Tensor]:
        logps = torch.empty(num_rows, dtype=self.dtype, device=self.weight.device)
        return logps, torch.empty_like(logps)

    def _check(self, hidden: Tensor, labels: Tensor) -> None:
        if hidden.dim() != 2 or labels.dim() != 1:
            raise InputError(
                f"hidden must be [N, D] and labels [N], got {tuple(hidden.shape)} and {tuple(labels.shape)}"
            )
        check_head(hidden, self.weight, labels)


class _Walk:
    """One call of `train`: what has been computed so far."""

    def __init__(self, head: Head, hidden: Tensor, labels: Tensor, ask: Ask, needs_weight: bool) -> None:
        self.head, self.hidden, self.labels, self.ask = head, hidden, labels, ask
        self.logps, self.entropies = head._empty(len(labels))
        self.d_hidden = torch.empty_like(hidden)
        self.needs_weight = needs_weight
        self.d_weight: Tensor | None = None

    def in_one_pass(self, windows: Sequence[slice], longest: int) -> bool:
        """False when a log-prob is out of the range that the pass can hold: then nothing here is valid."""
        from gruppo.kernel.triton_logits import RowStats, logits_pass

        head = self.head
        directions = head._buffer(longest, head.factor.dtype)
        stats = RowStats.empty(len(self.labels), self.hidden.device)
        self.logps, self.entropies = stats.logps, stats.entropies
        is_overflowed = None
        for window in windows:
            out, labels, rows = directions[: window.stop - window.start], self.labels[window], stats[window]
            logits_pass(self.hidden[window], head.weight, labels, head.shape, rows, out)
            if window is windows[-1]:
                is_overflowed = _Later(stats.overflowed)
            self._finish(window, out, self._grad(window) * rows.factor, (rows.residual, head.weight, labels))
        self._no_tokens()
        return is_overflowed is None or not is_overflowed.value()

    def in_chunks(self, windows: Sequence[slice], longest: int) -> None:
        head = self.head
        x = head._buffer(min(head.sizes.chunk, longest), head.dtype)
        directions = head._buffer(longest, head.factor.dtype)
        for window in windows:
            for part in _pieces(window, head.sizes.chunk):
                out = directions[part.start - window.start : part.stop - window.start]
                self.logps[part], self.entropies[part] = head.rows.stats_and_direction(
                    head._product(self.hidden[part], x), self.labels[part], head.shape, out
                )
            label_part = self._label_part(window, -1.0, 0.0)
            self._finish(window, directions[: window.stop - window.start], -self._grad(window), label_part)
        self._no_tokens()

    def with_entropy(self, windows: Sequence[slice], longest: int) -> None:
        """Keeps the logits of a window until the loss has been asked: the entropy's direction depends on its answer."""
        head = self.head
        x, gradients = head._buffer(longest, head.dtype), head._buffer(longest, head.factor.dtype)
        for window in windows:
            chunk = head._product(self.hidden[window], x)
            self.logps[window], self.entropies[window] = head.rows.stats(chunk, self.labels[window], head.shape)
            with torch.enable_grad():
                grad_logps, grad_entropies = self.ask(window, self.logps[window], self.entropies[window])
            if grad_entropies is None:
                grad_entropies = torch.zeros_like(grad_logps)
            head.rows.gradient(
                chunk,
                self.labels[window],
                grad_logps.to(head.dtype).contiguous(),
                grad_entropies.to(head.dtype).contiguous(),
                self.logps[window],
                self.entropies[window],
                head.shape,
                gradients[: len(chunk)],
            )
            label_part = self._label_part(window, grad_logps, grad_entropies)
            self._finish(window, gradients[: len(chunk)], torch.ones_like(self.logps[window]), label_part)
        self._no_tokens()

    def _label_part(self, window: slice, grad_logps: Tensor | float, grad_entropies: Tensor | float):
        """What rounding took from the label's column, a number that weighs as much as the rest of its row together."""
        head = self.head
        if not head.is_mixed or head.shape.soft_cap is not None:
            return None  # nothing is rounded; a cap's slope at the label is not at hand
        logps = self.logps[window]
        p = logps.exp()
        at_label = grad_logps * (1 - p) - grad_entropies * p * (logps + self.entropies[window])
        at_label = at_label * (head.shape.scale / head.shape.temperature)
        return at_label - at_label.to(head.factor.dtype).float(), head.weight, self.labels[window]

    def _grad(self, window: slice) -> Tensor:
        with torch.enable_grad():
            grad, _ = self.ask(window, self.logps[window], self.entropies[window])
        return grad.to(self.head.dtype)

    def _finish(
        self,
        window: slice,
        directions: Tensor,
        factor: Tensor,
        label_part: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """The two products of a window; `factor` is one number per row."""
        head, hidden = self.head, self.hidden[window]
        for part in _pieces(slice(0, len(directions)), PRODUCT_ROWS):
            product = head._mm(directions[part], head.factor)
            at_labels = None if label_part is None else (label_part[0][part], label_part[1], label_part[2][part])
            self._scale(product, factor[part], self.d_hidden[window][part], at_labels)
        if not self.needs_weight:
            return
        scaled = torch.empty(hidden.shape, dtype=directions.dtype, device=hidden.device)
        self._scale(hidden, factor, scaled)
        if self.d_weight is None:
            self.d_weight = head._mm(directions.T, scaled)
        elif head.is_mixed:
            torch.addmm(self.d_weight, directions.T, scaled, out_dtype=torch.float32, out=self.d_weight)  # type: ignore[call-overload]
        else:
            self.d_weight.addmm_(directions.T, scaled)

    def _scale(
        self,
        x: Tensor,
        factor: Tensor,
        out: Tensor,
        label_part: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        if self.head.route == "torch":
            if label_part is not None:
                residual, weight, labels = label_part
                x = x + residual[:, None] * weight[labels]
            out.copy_(x * factor[:, None])
        else:
            from gruppo.kernel.triton_logits import scale_rows

            scale_rows(x, factor.contiguous(), out, label_part)

    def _no_tokens(self) -> None:
        if self.needs_weight and self.d_weight is None:
            self.d_weight = torch.zeros(self.head.weight.shape, dtype=self.head.dtype, device=self.head.weight.device)


def best_route(weight: Tensor) -> str:
    """The fastest way that exists for this weight."""
    if not weight.is_cuda:
        return "torch"
    try:
        from gruppo.kernel.triton_logits import is_supported
    except ImportError:
        logger.info("Triton is not installed; the head uses torch operations")
        return "torch"
    return "logits" if is_supported(weight) else "triton"


def _pieces(window: slice, size: int) -> list[slice]:
    return [slice(a, min(a + size, window.stop)) for a in range(window.start, window.stop, size)]


class _Later:
    """A number on its way to the host: the GPU goes on with what is queued behind it while the host waits for it."""

    def __init__(self, value: Tensor) -> None:
        self.host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self.host.copy_(value, non_blocking=True)
        self.event = torch.cuda.Event() if value.is_cuda else None
        if self.event is not None:
            self.event.record()

    def value(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return bool(self.host)


def _asked_at_once(ask: Ask, logps: Tensor, entropies: Tensor, num_rows: int) -> Ask:
    with torch.enable_grad():
        grad_logps, grad_entropies = ask(slice(0, num_rows), logps, entropies)
    return lambda rows, _logps, _entropies: (grad_logps[rows], None if grad_entropies is None else grad_entropies[rows])


def _row_operations(route: str) -> ModuleType:
    if route == "torch":
        return torch_rows
    from gruppo.kernel import triton_rows

    return triton_rows


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
