"""The reference policy of the KL penalty.

With an adapter the reference is the model with the adapter switched off and costs nothing. Without one it is a frozen
copy, taken when it is first asked for, which must be before the first step.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gruppo.model.forward import Scorer


class Reference:
    """Scores under the reference policy."""

    def __init__(self, policy: Scorer) -> None:
        self.policy = policy
        self.is_adapter = hasattr(policy.model, "disable_adapter")
        self._copy: Scorer | None = None
        if not self.is_adapter:
            self._copy = self._frozen_copy()

    def refresh(self) -> None:
        """Make the policy as it is now the reference. Needs full weights: an adapter's reference is its base."""
        if self.is_adapter:
            raise TypeError("with LoRA the reference is the base model; merge the adapter to move it")
        self._copy = self._frozen_copy()

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

    def _frozen_copy(self) -> Scorer:
        model = copy.deepcopy(self.policy.model).requires_grad_(False).eval()
        for parameter in model.parameters():
            parameter.grad = None
        policy = self.policy
        return Scorer(model, temperature=policy.temperature, layout=policy.layout, head=policy.head)
