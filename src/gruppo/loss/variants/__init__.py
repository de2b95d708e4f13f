"""The published losses, each a few lines that name their parts. Equations, papers and peers: `docs/losses.md`.

    named.py      what they share
    clip.py       GRPO, GSPO, SAPO, CISPO, BNPO, Dr. GRPO, DAPO, dual and two-sided clip
    sequence.py   one ratio per sequence: GSPO-token, GMPO, LUSPO, VESPO
    region.py     other trust regions: DPPO, prime-rl's, IPO, M2PO, decoupled PPO
    selective.py  some tokens only: top entropy, Clip-Cov, KL-Cov
    gradient.py   no ratio: REINFORCE, GPG, DRO; and VAPO's imitation of what went well

To add one: a class in the file it belongs to, a line in LOSSES, a section in the page.
"""

from gruppo.loss.variants.clip import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    DualClipLoss,
    GRPOLoss,
    GSPOLoss,
    SAPOLoss,
    TwoSidedLoss,
)
from gruppo.loss.variants.gradient import DROLoss, GPGLoss, REINFORCELoss, VAPOLoss
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range
from gruppo.loss.variants.region import DecoupledPPOLoss, DPPOKLLoss, DPPOTVLoss, IPOLoss, M2POLoss, PrimeLoss
from gruppo.loss.variants.selective import ClipCovLoss, KLCovLoss, TopEntropyLoss
from gruppo.loss.variants.sequence import GMPOLoss, GSPOTokenLoss, LUSPOLoss, VESPOLoss

LOSSES: dict[str, type[NamedLoss]] = {
    "grpo": GRPOLoss,
    "gspo": GSPOLoss,
    "sapo": SAPOLoss,
    "cispo": CISPOLoss,
    "bnpo": BNPOLoss,
    "drgrpo": DRGRPOLoss,
    "dapo": DAPOLoss,
    "dual_clip": DualClipLoss,
    "two_sided": TwoSidedLoss,
    "gspo_token": GSPOTokenLoss,
    "gmpo": GMPOLoss,
    "luspo": LUSPOLoss,
    "vespo": VESPOLoss,
    "dppo_tv": DPPOTVLoss,
    "dppo_kl": DPPOKLLoss,
    "prime": PrimeLoss,
    "ipo": IPOLoss,
    "m2po": M2POLoss,
    "decoupled_ppo": DecoupledPPOLoss,
    "top_entropy": TopEntropyLoss,
    "clip_cov": ClipCovLoss,
    "kl_cov": KLCovLoss,
    "reinforce": REINFORCELoss,
    "gpg": GPGLoss,
    "dro": DROLoss,
    "vapo": VAPOLoss,
}
"""Every published loss by the name that `TrainConfig.loss` takes."""

__all__ = [
    "LOSSES",
    "BNPOLoss",
    "CISPOLoss",
    "ClipCovLoss",
    "ClipRange",
    "DAPOLoss",
    "DPPOKLLoss",
    "DPPOTVLoss",
    "DRGRPOLoss",
    "DROLoss",
    "DecoupledPPOLoss",
    "DualClipLoss",
    "GMPOLoss",
    "GPGLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GSPOTokenLoss",
    "IPOLoss",
    "KLCovLoss",
    "LUSPOLoss",
    "LossOptions",
    "M2POLoss",
    "NamedLoss",
    "PrimeLoss",
    "REINFORCELoss",
    "SAPOLoss",
    "TopEntropyLoss",
    "TwoSidedLoss",
    "VAPOLoss",
    "VESPOLoss",
    "read_clip_range",
]
