"""The actor: a transformers model that scores tokens and takes steps.

    transformers_model.py  TransformersModel: the public class, joins the pieces below
    scorer.py              PackedBatch -> log-probs and entropies, and the gradient of a loss of them
    logp_head.py           the head: from hidden states to log-probs
    plan.py, layout.py     micro-batches of a step, and the rows they run on
    lora.py                PEFT adapters that start at zero
    reference.py           log-probs of the reference policy: adapter off, or a frozen copy
    optim.py               optimizer, schedule, clipping, the guard against non-finite gradients
    checkpoint.py          training state and models in files; safetensors and JSON only

A different backend (a sharded model, another library) is another class with the same methods.
"""

from gruppo.errors import require_train

require_train("gruppo.model", "transformers")

from gruppo.model.lora import LoraSpec  # noqa: E402
from gruppo.model.transformers_model import TransformersModel  # noqa: E402

__all__ = ["LoraSpec", "TransformersModel"]
