"""The reference policy of the KL penalty.

With an adapter the reference is the model with the adapter switched off and costs nothing. Without one it is a frozen
copy, taken when it is first asked for, which must be before the first step. `refresh` moves that copy; a run that does
so keeps it in its checkpoints.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError
from gruppo.model.forward import Scorer


class Reference:
    """Scores under the reference policy."""

    def __init__(self, policy: Scorer) -> None:
        self.policy = policy
        self.is_adapter = hasattr(policy.model, "disable_adapter")
        self._copy: Scorer | None = None
        if not self.is_adapter:
            self._copy = self._frozen_copy()

    def refresh(self, mix: float = 1.0) -> None:
        """Move the reference towards the policy as it is now: `reference = mix * policy + (1 - mix) * reference`.

        1 copies, as after each stage of DeepSeekMath (arXiv:2402.03300); less is the soft update of TR-DPO
        (arXiv:2404.09656). Needs full weights: an adapter's reference is its base.
        """
        if self.is_adapter:
            raise TypeError("with LoRA the reference is the base model; merge the adapter to move it")
        if not 0 < mix <= 1:
            raise InputError(f"mix must be above 0 and at most 1, got {mix!r}")
        if mix == 1:
            self._copy = self._frozen_copy()
            return
        own = self._parameters()
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                own[name].lerp_(parameter, mix)

    @contextmanager
    def scorer(self) -> Iterator[Scorer]:
        if self._copy is not None:
            yield self._copy
            return
        with self.policy.model.disable_adapter():  # type: ignore[operator]  # PEFT's
            yield self.policy

    def weights(self) -> nn.Module | None:
        """The frozen copy, for checkpoints; None when there is none to save."""
        return None if self._copy is None else self._copy.model

    def state(self) -> dict[str, Tensor]:
        """The weights of the frozen copy by name, on the CPU."""
        return {name: p.detach().to("cpu").contiguous() for name, p in self._parameters().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Read back what `state` gave."""
        own = self._parameters()
        if {n: p.shape for n, p in own.items()} != {n: w.shape for n, w in weights.items()}:
            raise CheckpointError("the weights of the reference do not fit the model")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self._copy is not None, "an adapter's reference has no weights of its own"
        return dict(self._copy.model.named_parameters())

    def _frozen_copy(self) -> Scorer:
        model = copy.deepcopy(self.policy.model).requires_grad_(False).eval()
        for parameter in model.parameters():
            parameter.grad = None
        policy = self.policy
        return Scorer(model, temperature=policy.temperature, head=policy.head)
