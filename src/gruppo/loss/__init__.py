"""Losses of the group-relative family: level x surrogate x token weights + terms, aggregated.

A part is a function or a frozen dataclass with `__call__`. To add one, write it with the signature of its neighbours
and pass it to `PolicyLoss`. `docs/losses.md` has every equation and paper, `docs/extending.md` an example of each kind
of part.

    >>> import torch
    >>> from gruppo.loss import GRPOLoss
    >>> labels = torch.tensor([[-100, 3, 4], [-100, 5, -100]])
    >>> logps = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0]], requires_grad=True)
    >>> out = GRPOLoss(clip_range=0.2)({"labels": labels}, {"logps": logps}, advantages=[1.0, -1.0])
    >>> out.loss.item()
    0.0
"""

from gruppo.loss import named, parts, policy, terms, weights
from gruppo.loss.inputs import LossInputs
from gruppo.loss.named import *
from gruppo.loss.parts import *
from gruppo.loss.policy import *
from gruppo.loss.terms import *
from gruppo.loss.weights import *

__all__ = ["LossInputs"]
__all__ += named.__all__
__all__ += parts.__all__
__all__ += policy.__all__
__all__ += terms.__all__
__all__ += weights.__all__
