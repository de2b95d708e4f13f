"""Surrogates: what is done with ratio and advantage. Each gives the loss of a token, to be minimised.

A surrogate is called with the log-ratio `[T]` of the level and the LossInputs, and returns `[T]`. Its docstring or
`__str__` is the formula that `repr(loss)` prints.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs
from gruppo.loss.traits import part

__all__ = ["Clip", "ClippedWeight", "DualClip", "GammaWeight", "LogProb", "PolicyGradient", "SoftGate"]


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate, arXiv:1707.06347; with high > low DAPO's clip-higher, arXiv:2503.14476."""

    low: float = 0.2
    high: float = 0.2

    def __str__(self) -> str:
        return f"-min(r*A, clip(r, {1 - self.low:g}, {1 + self.high:g})*A)"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        # min(r*A, clip(r)*A) = min(r*A, most) = most - relu(most - r*A), where most = (1 + high)*A for A > 0 and
        # (1 - low)*A for A < 0. torch.min has a slow backward: it looks for ties.
        advantages_T = inputs.advantages
        most_T = F.leaky_relu(advantages_T, (1 - self.low) / (1 + self.high)).mul_(1 + self.high)
        return torch.addcmul(most_T, log_ratio_T.exp(), advantages_T, value=-1).relu_() - most_T


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class DualClip:
    """Clip, and for A < 0 a cap on the ratio, arXiv:1912.09729; also the two-sided clip of arXiv:2505.07291."""

    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0

    def __post_init__(self) -> None:
        if self.cap <= 1 + self.high:
            raise InputError(f"cap must exceed 1 + high = {1 + self.high:g}, got {self.cap:g}; 3 is usual")

    def __str__(self) -> str:
        return f"{Clip(self.low, self.high)}, and at most -{self.cap:g}*A where A < 0"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        clip_T = Clip(self.low, self.high)(log_ratio_T, inputs)
        capped_T = torch.min(clip_T, -self.cap * inputs.advantages)
        return torch.where(inputs.advantages < 0, capped_T, clip_T)


@part(per_token=True, zero_without_advantage=True, caps_every_sign=True)
@dataclass(frozen=True)
class ClippedWeight:
    """CISPO, arXiv:2506.13585: the capped ratio weighs the gradient of log p; no token's gradient is cut off."""

    high: float = 0.2

    def __str__(self) -> str:
        return f"-sg(min(r, {1 + self.high:g}))*A*logp"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        weight_T = log_ratio_T.detach().exp().clamp(max=1 + self.high)
        return -weight_T * inputs.advantages * inputs.logps


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class SoftGate:
    """SAPO, arXiv:2511.20347: a sigmoid gate on the ratio, with its own temperature for each sign of A."""

    tau_positive: float = 1.0
    tau_negative: float = 1.0

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise InputError(f"tau must be positive, got ({self.tau_positive:g}, {self.tau_negative:g})")

    def __str__(self) -> str:
        return f"-(4/tau)*sigmoid(tau*(r - 1))*A, tau = {self.tau_positive:g} if A > 0 else {self.tau_negative:g}"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        advantages_T = inputs.advantages
        tau_T = torch.full_like(advantages_T, self.tau_negative)
        tau_T = tau_T.masked_fill(advantages_T > 0, self.tau_positive)
        # expm1, because the gate is a function of r - 1, which is small where it matters
        return -torch.sigmoid(tau_T * log_ratio_T.expm1()) * (4 / tau_T) * advantages_T


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class PolicyGradient:
    """The ratio without a trust region; on-policy its gradient is REINFORCE's."""

    def __str__(self) -> str:
        return "-r*A"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return -log_ratio_T.exp() * inputs.advantages


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class LogProb:
    """REINFORCE: the log-prob itself, without a ratio. Its gradient is that of `PolicyGradient` at r = 1."""

    def __str__(self) -> str:
        return "-A*logp"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logps


@part(per_token=True, zero_without_advantage=True)
@dataclass(frozen=True)
class GammaWeight:
    """VESPO, arXiv:2602.10693: phi(w) = e^l * w^k * e^(-l*w) weighs the gradient of log p; phi(1) = 1."""

    positive: tuple[float, float] = (2.0, 3.0)  # (k, l) where A >= 0
    negative: tuple[float, float] = (3.0, 2.0)  # (k, l) where A < 0

    def __str__(self) -> str:
        return f"-sg(e^l*w^k*e^(-l*w))*A*logp, (k, l) = {self.positive} if A >= 0 else {self.negative}"

    def __call__(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        log_w_T = log_ratio_T.detach()
        is_negative_T = inputs.advantages < 0
        k_T = torch.full_like(log_w_T, self.positive[0]).masked_fill(is_negative_T, self.negative[0])
        l_T = torch.full_like(log_w_T, self.positive[1]).masked_fill(is_negative_T, self.negative[1])
        weight_T = (l_T + k_T * log_w_T - l_T * log_w_T.exp()).exp()
        return -weight_T * inputs.advantages * inputs.logps
