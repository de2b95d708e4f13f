"""HostInputs: the inputs of recomputed blocks wait for the backward in pinned host memory.

With recomputation a block keeps nothing but its input. On a long context these inputs are most of the memory that is
left; on the host they cost none of the GPU's. Copies run on a stream of their own, beside the computation, and the
backward of a block fetches the input of the block before it.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1 << 16
"""Elements below which a tensor stays where it is."""


class HostInputs:
    """Moves hidden states that autograd keeps to the host and back: `with inputs.moved(): forward`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._last: weakref.ref[_Kept] | None = None

    def moved(self) -> saved_tensors_hooks:
        """Hooks around the forward of a model whose blocks are recomputed."""
        self._last = None
        return saved_tensors_hooks(self._to_host, self._to_device)

    def _to_host(self, x: Tensor) -> "Tensor | _Kept":
        is_hidden = x.dim() == 3 and x.is_cuda and x.is_floating_point() and x.numel() >= SMALLEST
        if not is_hidden or isinstance(x, torch.nn.Parameter):
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)
        kept = _Kept(host, self._last)
        self._last = weakref.ref(kept)
        return kept

    def _to_device(self, kept: "Tensor | _Kept") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        assert kept.fetched is not None
        x, kept.fetched = kept.fetched, None
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        before = None if kept.before is None else kept.before()
        if before is not None:
            self._fetch(before)
        return x

    def _fetch(self, kept: "_Kept") -> None:
        if kept.fetched is not None:
            return
        # Memory of the main stream: what was queued before has to be done with it.
        kept.fetched = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            kept.fetched.copy_(kept.host, non_blocking=True)


class _Kept:
    """A tensor on the host, the one kept before it, and its copy on the device if that is on its way."""

    __slots__ = ("__weakref__", "before", "fetched", "host")

    def __init__(self, host: Tensor, before: "Any") -> None:
        self.host, self.before = host, before
        self.fetched: Tensor | None = None
