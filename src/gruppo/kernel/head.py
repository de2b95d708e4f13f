"""Head: hidden states -> log-probs -> loss -> gradients, without ever holding a [N, V] tensor.

A walk over scored tokens in windows. The gradient of any loss with respect to a row of logits is a *direction*, which
does not depend on the loss, times dL/dlogp, a number. So a window's logits are gone before the loss is computed; it is
computed once per window, in plain PyTorch, as any composition of parts, and two products finish the window:

    d_hidden = factor * (direction @ weight),      d_weight += direction.T @ (factor * hidden)

Nothing is computed twice: 6NDV operations trained, 4NDV with a frozen weight. Routes differ in how directions are made.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.logps import at_least_float32, check_head, check_temperature

logger = logging.getLogger(__name__)

GPU_SCRATCH = 1_300_000_000
CPU_SCRATCH = 1 << 28
"""Bytes of logits and directions held at a time, whatever the number of tokens: 1.21 GiB, on a CPU 256 MiB."""
CHUNK_ROWS = 512
MAX_WINDOW_ROWS = 8192
PRODUCT_ROWS = 2048  # d_hidden is fastest in pieces of this many rows (H200, cuBLAS of CUDA 13)

LossGradient = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows, logps, entropies) -> (dL/dlogp, dL/dentropy or None), each one number per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """Log-probs, entropies and the gradients of a loss."""

    logps: Tensor  # [N] float32
    entropies: Tensor  # [N] float32
    d_hidden: Tensor  # [N, D] in the dtype of the hidden states
    d_weight: Tensor | None  # [V, D] float32; None when frozen


@dataclass(frozen=True, slots=True)
class RowStats:
    """Numbers per row from a pass over windows; `stats[window]` is a view of one window."""

    logps: Tensor  # [N]
    entropies: Tensor  # [N]
    factor: Tensor  # [N]: d logp / d x over the direction
    residual: Tensor  # [N]: rounding error of the label's column of the direction
    overflowed: Tensor  # [1] int32: not 0 once a row was out of range

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> "RowStats":
        logps, entropies, factor, residual = torch.empty(4, num_rows, dtype=dtype, device=device)
        return cls(logps, entropies, factor, residual, torch.zeros(1, dtype=torch.int32, device=device))

    def __getitem__(self, window: slice) -> "RowStats":
        parts = (x[window] for x in (self.logps, self.entropies, self.factor, self.residual))
        return RowStats(*parts, overflowed=self.overflowed)


# --- routes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkRoute:
    """Float32 logits of a chunk of rows, then operations over it."""

    name: str
    operations: str
    """Module with `stats`, `gradient` and `scale_rows`."""
    holds_logits: bool = True

    @property
    def ops(self) -> Any:
        return import_module(self.operations)

    def window(
        self, head: "Head", hidden: Tensor, labels: Tensor, stats: RowStats, directions: Tensor | None
    ) -> Tensor | None:
        """Fill in a window's stats and, where wanted, its directions; returns the residuals if there are any."""
        x = head.buffer(min(head.sizes.chunk, len(labels)), head.dtype)
        for part in _pieces(len(labels), head.sizes.chunk):
            chunk = head.product(hidden[part], x)
            out = None if directions is None else directions[part]
            stats.logps[part], stats.entropies[part] = self.ops.stats(chunk, labels[part], head.shape, out)
        stats.factor.fill_(-1)
        return head.label_residual(stats.logps, stats.entropies, -1.0, 0.0)


@dataclass(frozen=True, slots=True)
class FusedRoute(ChunkRoute):
    """Softmax in the epilogue of the product; logits never reach memory."""

    holds_logits: bool = False

    def window(
        self, head: "Head", hidden: Tensor, labels: Tensor, stats: RowStats, directions: Tensor | None
    ) -> Tensor | None:
        from gruppo.kernel.triton_logits import logits_pass

        numbers = (stats.logps, stats.entropies, stats.factor, stats.residual, stats.overflowed)
        shape = (head.shape.temperature, head.shape.scale, head.shape.soft_cap)
        logits_pass(hidden, head.weight, labels, *shape, *numbers, directions)
        return stats.residual


TORCH = ChunkRoute("torch", "gruppo.kernel.chunk_ops")
TRITON = ChunkRoute("triton", "gruppo.kernel.triton_chunk_ops")
FUSED = FusedRoute("fused", "gruppo.kernel.triton_chunk_ops")
"""TORCH runs anywhere, TRITON on a GPU, FUSED there in bf16. FUSED leaves log-probs below -80 to TRITON, and to its
operations losses with a gradient through the entropy, whose direction depends on the loss."""


def best_route(weight: Tensor) -> ChunkRoute:
    """Fastest route available for this weight."""
    if not weight.is_cuda or not has_triton():
        return TORCH
    from gruppo.kernel.triton_logits import is_supported

    return FUSED if is_supported(weight) else TRITON


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        logger.info("Triton is not installed; the head uses torch operations")
        return False
    return True


# --- how much is held at a time ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows held at a time."""

    chunk: int  # of float32 logits
    window: int  # of directions
    entropy_window: int  # of both


def sizes(vocabulary: int, scratch_bytes: int, *, logit_bytes: int, direction_bytes: int, holds_logits: bool) -> Sizes:
    """Rows that fit into the scratch memory."""
    vocabulary = max(vocabulary, 1)
    chunk = max(1, min(CHUNK_ROWS, scratch_bytes // (4 * vocabulary * logit_bytes)))
    held = chunk * vocabulary * logit_bytes if holds_logits else 0
    window = max(1, min((scratch_bytes - held) // (vocabulary * direction_bytes), MAX_WINDOW_ROWS))
    whole = PRODUCT_ROWS if window >= PRODUCT_ROWS else min(chunk, window)  # whole pieces for the products
    both = max(1, min(scratch_bytes // (vocabulary * (logit_bytes + direction_bytes)), MAX_WINDOW_ROWS))
    return Sizes(chunk, window // whole * whole, both)


def memory_estimate(
    num_tokens: int,
    hidden_size: int,
    vocabulary: int,
    *,
    trained: bool,
    bytes_per_weight: int = 2,
    route: ChunkRoute = FUSED,
) -> dict[str, int]:
    """Bytes that `train` will allocate on a GPU: scratch, gradients and per-token results.

    >>> sum(memory_estimate(16384, 2560, 151936, trained=False).values()) < 1.5 * 2**30
    True
    """
    held = route.holds_logits
    rows = sizes(vocabulary, GPU_SCRATCH, logit_bytes=4, direction_bytes=bytes_per_weight, holds_logits=held)
    window = min(rows.window, num_tokens)
    chunk = min(rows.chunk, num_tokens) if held else 0
    piece = min(PRODUCT_ROWS, num_tokens)
    return {
        "scratch": chunk * vocabulary * 4 + window * vocabulary * bytes_per_weight,
        "d_hidden": num_tokens * hidden_size * bytes_per_weight + piece * hidden_size * 4,
        "d_weight": vocabulary * hidden_size * 4 + window * hidden_size * bytes_per_weight if trained else 0,
        "per_token": num_tokens * 4 * 6 + window * -(-vocabulary // 256) * 8,
    }


# --- the walk ---------------------------------------------------------------------------------------------------------


class Head:
    """Log-probs of tokens, and gradients of a loss of them, through `logits = hidden @ weight.T`.

    Args:
        weight: `[V, D]`, bf16 or float32.
        shape: temperature, scale, soft cap.
        scratch_bytes: memory for logits and directions, whatever the number of tokens.
        route: TORCH, TRITON or FUSED; None: the fastest there is.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        shape: LogitShape | None = None,
        scratch_bytes: int | None = None,
        route: ChunkRoute | None = None,
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
        self.sizes = sizes(
            len(weight),
            scratch_bytes or (GPU_SCRATCH if weight.is_cuda else CPU_SCRATCH),
            logit_bytes=self.dtype.itemsize,
            direction_bytes=self.factor.dtype.itemsize,
            holds_logits=self.route.holds_logits,
        )

    def windows(
        self, num_rows: int, lengths: Sequence[int] | None = None, size: int | None = None
    ) -> list[slice] | None:
        """Windows over the rows. With `lengths` they end at sequence boundaries; None when a sequence is too long."""
        size = size or self.sizes.window
        if lengths is None:
            return _pieces(num_rows, size)
        if any(n > size for n in lengths):
            return None
        bounds, end = [0], 0
        for n in lengths:
            if end + n - bounds[-1] > size:
                bounds.append(end)
            end += n
        return [slice(a, b) for a, b in pairwise([*bounds, end]) if b > a]

    @torch.no_grad()
    def score(self, hidden: Tensor, labels: Tensor, windows: Sequence[slice] | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies `[N]`; with the same windows bit for bit those of `train`."""
        self._check(hidden, labels)
        windows = windows or self.windows(len(labels)) or []
        for route in (self.route, TRITON):
            stats = RowStats.empty(len(labels), self.dtype, hidden.device)
            for window in windows:
                route.window(self, hidden[window], labels[window], stats[window], None)
            if route.holds_logits or not windows or not bool(stats.overflowed):
                break
        return stats.logps, stats.entropies

    @torch.no_grad()
    def train(
        self,
        hidden: Tensor,  # [N, D]
        labels: Tensor,  # [N] int64, all scored
        gradient: LossGradient,
        *,
        lengths: Sequence[int] | None = None,
        needs_weight: bool = True,
        entropy_gradient: bool = False,
    ) -> HeadResult:
        """Log-probs, entropies and the gradients of the loss.

        Args:
            gradient: dL/dlogp of the rows of each window, in order; computed in plain PyTorch.
            lengths: rows of each sequence, when the loss looks at whole sequences.
            needs_weight: False when the weight is frozen: its product is not computed.
            entropy_gradient: True when the loss has a gradient through the entropies.
        """
        self._check(hidden, labels)
        size = self.sizes.entropy_window if entropy_gradient else self.sizes.window
        windows = self.windows(len(labels), lengths, size)
        if windows is None:  # a sequence longer than a window: all log-probs first, then the loss once
            windows = self.windows(len(labels), None, size) or []
            gradient = _computed_at_once(gradient, *self.score(hidden, labels, windows))
        walk = _Walk(self, hidden, labels, gradient, needs_weight)
        if entropy_gradient:
            walk.with_entropy(windows)
        elif not walk.run(self.route, windows):
            logger.info("a scored token has a log-prob below -80: the head takes the slower, exact route")
            walk = _Walk(self, hidden, labels, gradient, needs_weight)
            walk.run(TRITON, windows)
        return walk.result()

    # --- shared with routes and walks -----------------------------------------------------------------------------

    def product(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Float32 logits before shape, into the buffer."""
        out = buffer[: len(hidden)]
        if self.is_mixed:
            return torch.mm(hidden, self.factor.T, out_dtype=torch.float32, out=out)  # type: ignore[call-overload]
        return torch.mm(hidden.to(self.dtype), self.factor.T, out=out)

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right, out_dtype=torch.float32) if self.is_mixed else left @ right  # type: ignore[call-overload]

    def buffer(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, len(self.weight), dtype=dtype, device=self.weight.device)

    def label_residual(
        self, logps: Tensor, entropies: Tensor, grad_logps: Tensor | float, grad_entropies: Tensor | float
    ) -> Tensor | None:
        """The bf16 rounding error of the label's column, whose entry is as large as the rest of the row combined."""
        if not self.is_mixed or self.shape.soft_cap is not None:
            return None  # nothing is rounded; a cap's slope at the label is not at hand
        p = logps.exp()
        at_label = grad_logps * (1 - p) - grad_entropies * p * (logps + entropies)
        at_label = at_label * (self.shape.scale / self.shape.temperature)
        return at_label - at_label.to(self.factor.dtype).float()

    def _check(self, hidden: Tensor, labels: Tensor) -> None:
        if hidden.dim() != 2 or labels.dim() != 1:
            raise InputError(
                f"hidden must be [N, D] and labels [N], got {tuple(hidden.shape)} and {tuple(labels.shape)}"
            )
        check_head(hidden, self.weight, labels)


class _Walk:
    """State of one call of `train`."""

    def __init__(self, head: Head, hidden: Tensor, labels: Tensor, gradient: LossGradient, needs_weight: bool) -> None:
        self.head, self.hidden, self.labels, self.gradient = head, hidden, labels, gradient
        self.stats = RowStats.empty(len(labels), head.dtype, hidden.device)
        self.d_hidden = torch.empty_like(hidden)
        self.needs_weight = needs_weight
        self.d_weight: Tensor | None = None

    def run(self, route: ChunkRoute, windows: Sequence[slice]) -> bool:
        """False when a log-prob is out of the range that the route can hold: then nothing here is valid."""
        head = self.head
        directions = head.buffer(_longest(windows), head.factor.dtype)
        is_overflowed = None
        for window in windows:
            rows, out = self.stats[window], directions[: window.stop - window.start]
            residual = route.window(head, self.hidden[window], self.labels[window], rows, out)
            if window is windows[-1] and not route.holds_logits:
                is_overflowed = _Later(self.stats.overflowed)
            with torch.enable_grad():
                grad, _ = self.gradient(window, rows.logps, rows.entropies)
            self._finish(window, out, grad.to(head.dtype) * rows.factor, residual)
        return is_overflowed is None or not is_overflowed.value()

    def with_entropy(self, windows: Sequence[slice]) -> None:
        """Keeps the logits of a window until the loss is known: the entropy's direction depends on its gradient."""
        head, longest = self.head, _longest(windows)
        ops = head.route.ops
        x, gradients = head.buffer(longest, head.dtype), head.buffer(longest, head.factor.dtype)
        for window in windows:
            rows, labels = self.stats[window], self.labels[window]
            chunk = head.product(self.hidden[window], x)
            rows.logps[:], rows.entropies[:] = ops.stats(chunk, labels, head.shape)
            with torch.enable_grad():
                grad_logps, grad_entropies = self.gradient(window, rows.logps, rows.entropies)
            if grad_entropies is None:
                grad_entropies = torch.zeros_like(grad_logps)
            grads = (grad_logps.to(head.dtype).contiguous(), grad_entropies.to(head.dtype).contiguous())
            out, numbers = gradients[: len(chunk)], (rows.logps, rows.entropies)
            ops.gradient(chunk, labels, numbers, grads, head.shape, out)
            residual = head.label_residual(*numbers, *grads)
            self._finish(window, out, torch.ones_like(rows.logps), residual)

    def result(self) -> HeadResult:
        head = self.head
        if self.needs_weight and self.d_weight is None:  # no tokens
            self.d_weight = torch.zeros(head.weight.shape, dtype=head.dtype, device=head.weight.device)
        stats = self.stats
        return HeadResult(logps=stats.logps, entropies=stats.entropies, d_hidden=self.d_hidden, d_weight=self.d_weight)

    def _finish(self, window: slice, directions: Tensor, factor: Tensor, residual: Tensor | None) -> None:
        """The two products of a window; `factor` is one number per row."""
        head, hidden, labels = self.head, self.hidden[window], self.labels[window]
        scale_rows, factor = head.route.ops.scale_rows, factor.contiguous()
        for part in _pieces(len(directions), PRODUCT_ROWS):
            product = head.mm(directions[part], head.factor)
            label_part = None if residual is None else (residual[part], head.weight, labels[part])
            scale_rows(product, factor[part], self.d_hidden[window][part], label_part)
        if not self.needs_weight:
            return
        scaled = torch.empty(hidden.shape, dtype=directions.dtype, device=hidden.device)
        scale_rows(hidden, factor, scaled)
        if self.d_weight is None:
            self.d_weight = head.mm(directions.T, scaled)
        elif head.is_mixed:
            torch.addmm(self.d_weight, directions.T, scaled, out_dtype=torch.float32, out=self.d_weight)  # type: ignore[call-overload]
        else:
            self.d_weight.addmm_(directions.T, scaled)


class _Later:
    """Number being copied to the host: the GPU carries on with queued work while the host waits."""

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


def _pieces(num_rows: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, num_rows)) for a in range(0, num_rows, size)]


def _longest(windows: Sequence[slice]) -> int:
    return max((w.stop - w.start for w in windows), default=0)


def _computed_at_once(gradient: LossGradient, logps: Tensor, entropies: Tensor) -> LossGradient:
    with torch.enable_grad():
        grad_logps, grad_entropies = gradient(slice(0, len(logps)), logps, entropies)
    return lambda rows, _logps, _entropies: (grad_logps[rows], None if grad_entropies is None else grad_entropies[rows])
