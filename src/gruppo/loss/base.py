"""The policy that a part compares the current one with: the trainer's at sampling time, or the sampler itself."""

from typing import Literal

from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs

Base = Literal["old", "sampler"]


class AgainstBase:
    """Mixed into parts with a field `base`: what they need, and the log-probs that it names."""

    base: Base

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sampler_logps"} if self.base == "sampler" else ())

    def base_logps(self, inputs: LossInputs) -> Tensor:
        base_T = inputs.sampler_logps if self.base == "sampler" else inputs.old_logps
        assert base_T is not None, "PolicyLoss checks `needs` before it calls a part"
        return base_T


def check_base(base: str) -> None:
    if base not in ("old", "sampler"):
        raise InputError(f"base must be 'old' or 'sampler', got {base!r}")
