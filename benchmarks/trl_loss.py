"""TRL's GRPO loss on given log-probs: the code of `GRPOTrainer._compute_loss`, without a model.

The trainer's `__init__` wants a model, a tokenizer and a dataset, none of which the loss needs. So the object is made
without it and gets only the attributes that `_compute_loss` reads, with the values that `GRPOConfig(loss_type="grpo",
beta=0)` and one process give them. Of TRL's own code only the model's forward is replaced:
`_get_per_token_logps_and_entropies` returns the tensors it is given. Everything after it runs as published.

`_compute_loss` does more than a loss: it joins prompt and completion into the model's input, and it ends in metrics for
the log. `loss_only=True` leaves both out, line by line from its own source, so that like is compared with like.
"""

import inspect
import textwrap
from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any

from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

MODEL_INPUT = (
    "input_ids = torch.cat([prompt_ids, completion_ids], dim=1)",
    "attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)",
)
"""The lines of `_compute_loss` whose results nothing but the model's forward uses."""

LOGGING_STARTS = "# Log the metrics"
"""The comment of `_compute_loss` after which it computes nothing but metrics for its log."""


class _OneProcess:
    """What `_compute_loss` asks of accelerate, when there is nobody to talk to."""

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


class _Trainer(GRPOTrainer):
    def __init__(self, logps_BC: Tensor, entropies_BC: Tensor, clip_range: float) -> None:
        # deliberately no super().__init__()
        self.outputs = (logps_BC, entropies_BC, None)  # the third is the loss of a mixture of experts
        self.epsilon_low = self.epsilon_high = clip_range
        self.beta = 0.0
        self.loss_type = "grpo"
        self.importance_sampling_level = "token"
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.use_vllm = False
        self.aux_loss_enabled = False
        self._entropy_bonus_enabled = False
        self.current_gradient_accumulation_steps = 1
        self.args = SimpleNamespace(delta=None)
        self.model = SimpleNamespace(training=True)
        self.accelerator = _OneProcess()
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.outputs


class TRLLoss:
    """Calls TRL's loss on fixed inputs.

    Args:
        logps_BC: log-probs of the completion columns, with gradient.
        entropies_BC: their entropies; TRL only logs them.
        inputs: what the trainer hands to `_compute_loss`: ids and masks, advantages, old log-probs.
        clip_range: epsilon, both sides.
        loss_only: leave out the model's input and the metrics.
    """

    def __init__(
        self, logps_BC: Tensor, entropies_BC: Tensor, inputs: dict[str, Tensor], clip_range: float, loss_only: bool
    ) -> None:
        trainer = _Trainer(logps_BC, entropies_BC, clip_range)
        self.inputs = inputs
        self.compute = MethodType(_loss_lines(), trainer) if loss_only else trainer._compute_loss
        self.trainer = trainer

    def __call__(self) -> Tensor:
        return self.compute(self.trainer.model, self.inputs)


def _loss_lines() -> Any:
    """`_compute_loss` from its own source, without MODEL_INPUT, up to LOGGING_STARTS."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss))
    for text in (*MODEL_INPUT, LOGGING_STARTS):
        if source.count(text) != 1:
            raise RuntimeError(
                f"trl's _compute_loss holds {text!r} {source.count(text)} times, expected once: "
                "this is not the version that benchmarks/setup_peers.sh installs"
            )
    for line in MODEL_INPUT:
        source = source.replace(line, line.split(" = ")[0] + " = None")
    source = source.split(LOGGING_STARTS)[0].rstrip() + "\n    return loss\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, grpo_trainer.__file__, "exec"), vars(grpo_trainer), namespace)
    return namespace["_compute_loss"]
