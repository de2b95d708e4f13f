"""Losses of the group-relative family: level x surrogate x token weights + terms, aggregated.

    inputs.py     LossInputs: everything per token, flat, aligned, masked; all checks of user input
    level.py      the importance ratio of a token: its own, or its sequence's
    surrogate.py  what is done with ratio and advantage
    weights.py    what multiplies the policy term: corrections for the sampler, selections of tokens, trust regions
    terms.py      what is added to it: KL to the reference, entropy bonus, and others
    aggregate.py  the weight of a token in the sum, from the totals of the step
    traits.py     traits of a part: what follows from using it
    policy.py     PolicyLoss: puts the parts together
    named.py      the published losses, each a few lines that name their parts

A part is a function or a frozen dataclass with `__call__`; to add one, write it with the signature of its neighbours
and hand it to `PolicyLoss`. `docs/losses.md` has every equation, paper and peer, `docs/extending.md` a part of each
kind.

    >>> import torch
    >>> from gruppo.loss import GRPOLoss
    >>> labels = torch.tensor([[-100, 3, 4], [-100, 5, -100]])
    >>> logps = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]], requires_grad=True)
    >>> out = GRPOLoss(clip_range=0.2)({"labels": labels}, {"logps": logps}, advantages=[1.0, -1.0])
    >>> out.loss.item()
    0.0
"""

from gruppo.loss import aggregate, level, named, policy, surrogate, terms, weights
from gruppo.loss.aggregate import *
from gruppo.loss.inputs import LossInputs
from gruppo.loss.level import *
from gruppo.loss.named import *
from gruppo.loss.policy import *
from gruppo.loss.surrogate import *
from gruppo.loss.terms import *
from gruppo.loss.traits import part
from gruppo.loss.weights import *

__all__ = ["LossInputs", "part"]
__all__ += aggregate.__all__
__all__ += level.__all__
__all__ += named.__all__
__all__ += policy.__all__
__all__ += surrogate.__all__
__all__ += terms.__all__
__all__ += weights.__all__
