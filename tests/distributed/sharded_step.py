"""Steps of models that FSDP2 shards, on one of several ranks: `python sharded_step.py RANK WORLD STORE OUT CASE...`.

A model is sharded as it was built, by torch alone: `fully_shard` on its blocks and on the whole. What the rank has
computed of each case goes to a file: the gradient of every parameter, the loss and its terms, and the metrics.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parents[1] / "unit" / "model")]
# ruff: noqa: E402  a rank is a script of its own, which pytest's paths do not reach

from tiny_models import perturb_adapter, random_features, tiny_model

from gruppo.loss import LOSSES
from gruppo.metric import GRPOMetric
from gruppo.model import LoraSpec, TransformersModel

FEATURES = random_features(num=10, seed=4)
ADVANTAGES = [1.0, -0.5, 0.25, 0.0, -1.0, 0.5, -2.0, 0.75, 0.0, 1.5]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "walk": {"head": "walk"},
    "shared prompts": {"layout": "shared"},
    "gspo with kl": {"loss": ("gspo", {"beta": 0.1})},
    "entropy, walked": {"loss": ("dapo", {"entropy_coef": 0.1}), "head": "walk"},
    "looks at the whole step": {"loss": ("top_entropy", {"share": 0.4})},
    "tied": {"family": "qwen3"},
    "tied, walked": {"family": "qwen3", "head": "walk"},
    "bias": {"family": "phi", "head": "walk"},
    "soft cap": {"family": "gemma2", "head": "walk"},
    "adapter": {"lora": LoraSpec(rank=2)},
    "recomputed": {"gradient_checkpointing": True, "head": "walk"},
    "one forward": {"tokens_per_microbatch": None},  # one rank has all of it, the others nothing
    "no signal": {"advantages": [0.0] * 10},
    "no signal, kl": {"advantages": [0.0] * 10, "loss": ("grpo", {"beta": 0.3})},
}


def run(case: str, group: Any = None) -> dict[str, Any]:
    """Gradients, loss and metrics of a step, over the ranks of a group or in this process alone."""
    options = {"tokens_per_microbatch": 24, "layout": "padded"} | CASES[case]
    family, advantages = options.pop("family", "llama"), options.pop("advantages", ADVANTAGES)
    name, coefficients = options.pop("loss", ("grpo", {}))
    model = TransformersModel(tiny_model(family), device="cpu", process_group=group, **options)
    if options.get("lora"):
        perturb_adapter(model.model)
    model.set_loss(LOSSES[name](**coefficients))
    model.add_metric(GRPOMetric(process_group=group))
    if group is not None:
        shard(model.model)
    old = [(x - 0.1).tolist() for x in model.forward_only(FEATURES)["logps"]]
    output = model.forward_backward(FEATURES, advantages=advantages, old_logps=old, sampler_logps=old)
    grads = {}
    for key, parameter in model.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            grads[key] = None if whole is None else whole.double().flatten().tolist()
    norm = model.clip_grad_and_step(None).grad_norm
    terms = {key: value.item() for key, value in output.terms.items()}
    metrics = {k: v for k, v in model.calculate_metric().items() if isinstance(v, float)}
    return {"grads": grads, "loss": output.loss.item(), "terms": terms, "norm": norm, "metrics": metrics}


def shard(model: torch.nn.Module) -> None:
    """As torch's documentation does it: the blocks, then the whole. Gradients are added up, not averaged."""
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    assert blocks
    for module in (*blocks, model):
        fully_shard(module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def main() -> None:
    rank, world, store, out, *cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    Path(out).write_text(json.dumps({case: run(case, dist.group.WORLD) for case in cases}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
