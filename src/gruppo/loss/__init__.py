"""Losses of the group-relative family: level x surrogate x KL x aggregation x correction x selection.

    inputs.py        LossInputs: everything per token, flat, aligned, masked; all checks of user input
    level.py         the importance ratio of a token: its own, or its sequence's
    surrogate.py     what is done with ratio and advantage
    kl.py            the penalty towards the reference policy
    aggregate.py     the weight of a token, from the totals of the step
    base.py          the policy that a part compares with: old, or the sampler
    correction.py    weights for the gap between sampler and trainer
    select.py        which tokens the policy term acts on, judged over the whole step
    trust_region.py  selections by how far a token's probability has moved
    part.py          what a part says about itself
    composition.py   which parts go together, and what they make in words
    survey.py        what a loss counts over the whole step before its first backward
    policy.py        PolicyLoss: puts the parts together
    catalogue.py     one of every part, and which go together
    variants/        the published names, each a few lines that name their parts

A part is a function or a frozen dataclass with `__call__`; to add one, write it with the signature of its
neighbours and hand it to `PolicyLoss`. `docs/losses.md` has every equation, paper and peer, `docs/extending.md` a part
of each kind.

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
    token_sum,
)
from gruppo.loss.correction import (
    CORRECTIONS,
    KeepWithin,
    MaskedWeight,
    Normalized,
    OffPolicySequenceMask,
    Product,
    TruncatedWeight,
)
from gruppo.loss.inputs import LossInputs
from gruppo.loss.kl import (
    KL_ESTIMATORS,
    KL_NAMES,
    absolute,
    k1,
    k2,
    k3,
    k3_straight_through,
    ratio_k1,
    ratio_k3,
)
from gruppo.loss.level import (
    ClippedMean,
    CorrectedSum,
    sampler_level,
    sequence_level,
    sequence_sum_level,
    sequence_token_level,
    token_level,
)
from gruppo.loss.part import says
from gruppo.loss.policy import LossOutput, PolicyLoss
from gruppo.loss.select import (
    ClipCovariance,
    CovariancePenalty,
    SecondMoment,
    TokenMask,
    TopEntropy,
    VariationBudget,
)
from gruppo.loss.surrogate import Clip, ClippedWeight, DualClip, GammaWeight, LogProb, PolicyGradient, SoftGate
from gruppo.loss.trust_region import KLRegion, ProbabilityBand, TVRegion
from gruppo.loss.variants import (
    LOSSES,
    BNPOLoss,
    CISPOLoss,
    ClipCovLoss,
    DAPOLoss,
    DecoupledPPOLoss,
    DPPOKLLoss,
    DPPOTVLoss,
    DRGRPOLoss,
    DROLoss,
    DualClipLoss,
    GMPOLoss,
    GPGLoss,
    GRPOLoss,
    GSPOLoss,
    GSPOTokenLoss,
    IPOLoss,
    KLCovLoss,
    LossOptions,
    LUSPOLoss,
    M2POLoss,
    NamedLoss,
    PrimeLoss,
    REINFORCELoss,
    SAPOLoss,
    TopEntropyLoss,
    TwoSidedLoss,
    VAPOLoss,
    VESPOLoss,
)

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "KL_NAMES",
    "LOSSES",
    "BNPOLoss",
    "CISPOLoss",
    "Clip",
    "ClipCovLoss",
    "ClipCovariance",
    "ClippedMean",
    "ClippedWeight",
    "ConstantLength",
    "CorrectedSum",
    "CovariancePenalty",
    "DAPOLoss",
    "DPPOKLLoss",
    "DPPOTVLoss",
    "DRGRPOLoss",
    "DROLoss",
    "DecoupledPPOLoss",
    "DualClip",
    "DualClipLoss",
    "GMPOLoss",
    "GPGLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "GammaWeight",
    "IPOLoss",
    "KLCovLoss",
    "KLRegion",
    "KeepWithin",
    "LUSPOLoss",
    "LogProb",
    "LossInputs",
    "LossOptions",
    "LossOutput",
    "M2POLoss",
    "MaskedWeight",
    "NamedLoss",
    "Normalized",
    "OffPolicySequenceMask",
    "PolicyGradient",
    "PolicyLoss",
    "PrimeLoss",
    "ProbabilityBand",
    "Product",
    "REINFORCELoss",
    "SAPOLoss",
    "SecondMoment",
    "SoftGate",
    "TVRegion",
    "TokenMask",
    "TopEntropy",
    "TopEntropyLoss",
    "TruncatedWeight",
    "TwoSidedLoss",
    "VAPOLoss",
    "VESPOLoss",
    "VariationBudget",
    "absolute",
    "k1",
    "k2",
    "k3",
    "k3_straight_through",
    "local_token_mean",
    "ratio_k1",
    "ratio_k3",
    "sampler_level",
    "says",
    "sequence_level",
    "sequence_mean",
    "sequence_mean_token_sum",
    "sequence_sum_level",
    "sequence_token_level",
    "token_level",
    "token_mean",
    "token_sum",
]
