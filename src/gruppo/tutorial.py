"""The functions of the post "GRPO 101: Calculating Loss in Group Relative Policy Optimization", made right.

Two texts and an advantage go in, a loss with gradient comes out. Names and arguments are those of the post, whose cells
run with these functions; docs/tutorial.md follows it. The tokenizer is a variable of the module, as in the post:

    gruppo.tutorial.tokenizer = AutoTokenizer.from_pretrained(model_str)
    grpo_loss(model, ref_model, "The quick brown fox jumped over the ", "fence and", advantage=2.0)
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.kernel.logps import logps_and_entropy
from gruppo.loss import GRPOLoss, PolicyGradient, PolicyLoss
from gruppo.task.prompts import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["compute_log_probs", "grpo_loss", "grpo_loss_with_clip", "grpo_loss_with_kl", "prepare_inputs"]

tokenizer: "PreTrainedTokenizerBase | None" = None
"""The tokenizer of policy and reference. Assign it before the first call."""


def prepare_inputs(prompt: str, completion: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids `[1, L]`, attention mask `[1, L]` (all 1), and completion mask `[L]`: 1 for tokens of the completion.

    The tokenizer adds its special tokens to the prompt only. A start token between prompt and completion would be
    scored, though no model ever wrote one there.
    """
    if tokenizer is None:
        raise InputError(
            "gruppo.tutorial.tokenizer is None; assign the tokenizer of your model first: "
            "gruppo.tutorial.tokenizer = AutoTokenizer.from_pretrained(model_str)"
        )
    encoded: Any = tokenizer(completion, add_special_tokens=False)
    prompt_ids, completion_ids = list(encode_texts([prompt], tokenizer)[0]), encoded["input_ids"]
    if not prompt_ids:
        raise InputError(f"prompt {prompt!r} has no token, so the completion has nothing to follow; give it some text")
    if not completion_ids:
        raise InputError(f"completion {completion!r} has no token, so there is nothing to score; give it some text")
    input_ids = torch.tensor([prompt_ids + completion_ids])
    completion_mask = torch.zeros(input_ids.shape[1])
    completion_mask[len(prompt_ids) :] = 1.0
    return input_ids, torch.ones_like(input_ids), completion_mask


def compute_log_probs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Log-prob of each token given those before it, `[B, L]`: entry t is token t's, as in the completion mask.

    The first token has none before it and gets 0. Dropout is off while the model runs: two passes of one model agree.
    """
    device = next(model.parameters()).device
    # Module by module: PEFT leaves new dropout layers in train mode inside a model in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits_BLV = model(input_ids.to(device), attention_mask=attention_mask.to(device)).logits
    finally:
        for module, was_training in modes:
            module.training = was_training
    # The logits at slot t predict the next token, so token t is scored by the logits at t - 1.
    logps, _ = logps_and_entropy(logits_BLV[:, :-1], input_ids[:, 1:].to(logits_BLV.device))
    return F.pad(logps, (1, 0))


def grpo_loss(model: nn.Module, ref_model: nn.Module, prompt: str, completion: str, advantage: float) -> Tensor:
    """The basic loss: mean of `-ratio * advantage` over the tokens of the completion.

    As in the post, `ratio` is policy over reference: the first step of a run, where the reference is the policy that
    sampled. Later in training the two differ, and the ratio is over the policy that sampled (`old_logps` of a loss).
    """
    return _apply(PolicyLoss(surrogate=PolicyGradient()), model, ref_model, prompt, completion, advantage)


def grpo_loss_with_clip(
    model: nn.Module, ref_model: nn.Module, prompt: str, completion: str, advantage: float, epsilon: float = 0.2
) -> Tensor:
    """Mean of `-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A)`; the ratio is that of `grpo_loss`."""
    return _apply(GRPOLoss(clip_range=epsilon), model, ref_model, prompt, completion, advantage)


def grpo_loss_with_kl(
    model: nn.Module,
    ref_model: nn.Module,
    prompt: str,
    completion: str,
    advantage: float,
    epsilon: float = 0.2,
    beta: float = 0.1,
) -> Tensor:
    """The clipped loss plus `beta` times the mean of `exp(-delta) - 1 + delta`, `delta = logp - ref_logp` (k3)."""
    return _apply(GRPOLoss(clip_range=epsilon, beta=beta), model, ref_model, prompt, completion, advantage)


def _apply(
    loss: PolicyLoss, model: nn.Module, ref_model: nn.Module, prompt: str, completion: str, advantage: float
) -> Tensor:
    input_ids, attention_mask, completion_mask = prepare_inputs(prompt, completion)
    logps = compute_log_probs(model, input_ids, attention_mask)
    with torch.no_grad():
        ref_logps = compute_log_probs(ref_model, input_ids, attention_mask)
    labels = input_ids.masked_fill(completion_mask == 0, IGNORE_INDEX).to(logps.device)
    # In float64, so that the mean of n equal losses is that loss after rounding, whatever n is.
    outputs = {"logps": logps.double()}
    result = loss({"labels": labels}, outputs, advantages=[advantage], old_logps=ref_logps, ref_logps=ref_logps)
    return result.loss.to(logps.dtype)
