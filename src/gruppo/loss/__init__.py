"""Losses of the group-relative family: level x surrogate x KL x aggregation (x correction).

    inputs.py      LossInputs: everything per token, flat, aligned, masked; all checks of user input
    level.py       the importance ratio of a token: its own, or its sequence's
    surrogate.py   what is done with ratio and advantage
    kl.py          the penalty towards the reference policy
    aggregate.py   the weight of a token, from the totals of the step
    correction.py  weights for the gap between sampler and trainer
    policy.py      PolicyLoss: puts the parts together
    variants.py    the published names, each a few lines that name their parts

A part is a function or a frozen dataclass with `__call__`; to add one, write it with the signature of its
neighbours and hand it to `PolicyLoss`. `docs/losses.md` has every equation, paper and peer.

    >>> import torch
    >>> from gruppo.loss import GRPOLoss
    >>> labels = torch.tensor([[-100, 3, 4], [-100, 5, -100]])
    >>> logps = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]], requires_grad=True)
    >>> out = GRPOLoss(clip_range=0.2)({"labels": labels}, {"logps": logps}, advantages=[1.0, -1.0])
    >>> out.loss.item()
    0.0
"""

from gruppo.loss.aggregate import (
    ConstantLength,
    local_token_mean,
    sequence_mean,
    sequence_mean_token_sum,
    token_mean,
)
from gruppo.loss.correction import MaskedWeight, TruncatedWeight
from gruppo.loss.inputs import LossInputs
from gruppo.loss.kl import KL_ESTIMATORS, k1, k2, k3, ratio_k1, ratio_k3
from gruppo.loss.level import sequence_level, sequence_sum_level, sequence_token_level, token_level
from gruppo.loss.policy import LossOutput, PolicyLoss
from gruppo.loss.surrogate import Clip, ClippedWeight, DualClip, GammaWeight, PolicyGradient, SoftGate
from gruppo.loss.variants import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    SAPOLoss,
)

__all__ = [
    "KL_ESTIMATORS",
    "BNPOLoss",
    "CISPOLoss",
    "Clip",
    "ClippedWeight",
    "ConstantLength",
    "DAPOLoss",
    "DRGRPOLoss",
    "DualClip",
    "GRPOLoss",
    "GSPOLoss",
    "GammaWeight",
    "LossInputs",
    "LossOutput",
    "MaskedWeight",
    "PolicyGradient",
    "PolicyLoss",
    "SAPOLoss",
    "SoftGate",
    "TruncatedWeight",
    "k1",
    "k2",
    "k3",
    "local_token_mean",
    "ratio_k1",
    "ratio_k3",
    "sequence_level",
    "sequence_mean",
    "sequence_mean_token_sum",
    "sequence_sum_level",
    "sequence_token_level",
    "token_level",
    "token_mean",
]
