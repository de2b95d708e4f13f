"""Bytes that ranks exchange in an update: counted in real collectives, beside the formula.

    python benchmarks/communication.py                          # 2 and 4 ranks over gloo, every case
    python benchmarks/communication.py --ranks 2 --cases full   # as JSON too: --out counts.json

Every rank is a process. The first updates a small model once, the others follow, as in a run. A dispatch mode of torch
sees each collective with its tensors, whoever calls it: FSDP, DTensor or gruppo. Of S bytes that are gathered, reduced
and scattered, or exchanged, a rank sends at least (N-1)/N, and twice that of S bytes that are all-reduced; NCCL's rings
send just that. A message of S bytes goes to every other rank whole.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gruppo.batch.packed import as_rollouts
from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec
from gruppo.model.compiled_blocks import find_blocks
from gruppo.types import InputFeature, Rollout

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "exact": {"exact": True},
    "recomputed": {"gradient_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "kl": {"beta": 0.1},
    "lora": {"lora": LoraSpec(rank=4)},
    "lora, kl": {"lora": LoraSpec(rank=4), "beta": 0.1},
}
SEQUENCES, PROMPT, COMPLETION, TOKENS = 48, 16, 128, 3 * (16 + 128)
"""Of the update: so many sequences of so many tokens, and tokens of a micro-batch."""


# --- formula ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that each rank sends for a micro-batch."""

    gathered: float
    """Weights, for forward and backward."""
    reduced: float
    """Gradients."""


def traffic(model: nn.Module, *, ranks: int, dtype: torch.dtype, has_reference: bool = False) -> Traffic:
    """Bytes of a micro-batch by formula. The model may be on the meta device.

    A micro-batch gathers all weights for its forward and the blocks again for its backward (what is outside of them
    stays), and reduces the gradients of what trains, in float32. Recomputation needs no third gather: a block is there
    when its backward begins. A reference, be it a copy or the model without its adapter, gathers all weights once more.
    """
    share = (ranks - 1) / ranks
    whole = _padded(model.parameters(), ranks)
    blocks = sum(_padded(block.parameters(), ranks) for block in find_blocks(model))
    trained = _padded((parameter for parameter in model.parameters() if parameter.requires_grad), ranks)
    return Traffic(
        gathered=share * dtype.itemsize * (whole * (2 if has_reference else 1) + blocks), reduced=share * 4 * trained
    )


def message_bytes(*, prompt_tokens: int, completion_tokens: int, sequences: int) -> int:
    """Bytes of the step that the first rank sends to all: ids, log-probs, nine numbers of each sequence, and names.

    Args:
        prompt_tokens: of all prompts; one that is shared counts once.
    """
    return 8 * prompt_tokens + 16 * completion_tokens + 73 * sequences + 2048


def _padded(parameters: Iterable[nn.Parameter], ranks: int) -> int:
    """Numbers in these parameters when each rank has as many rows."""
    return sum(-(-len(parameter) // ranks) * ranks * parameter[0].numel() for parameter in parameters)


# --- count ------------------------------------------------------------------------------------------------------------


KINDS = {
    "_allgather_base_": "all-gather", "allgather_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all", "all_to_all_single": "all-to-all",
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "broadcast_": "broadcast",
}  # fmt: skip
"""Collectives by the names of torch's operators."""
WAITS = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "send", "recv_")
"""Operators that send nothing, or the eight bytes of a message's length."""


class Counted(TorchDispatchMode):
    """Calls and bytes of the collectives inside, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)
        """The largest side of each: what is gathered, reduced, exchanged or sent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in WAITS:
            kind = KINDS[name]  # an unknown collective is an error, not a byte too few
            self.calls[kind] += 1
            sides = [args[0], args[1] if len(args) > 1 else (), result if space == "_c10d_functional" else ()]
            self.bytes[kind] += max(sum(x.nbytes for x in tree_leaves(side) if isinstance(x, Tensor)) for side in sides)
        return result


def small_model(hidden_size: int = 96, inner_size: int = 192) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": inner_size, "num_hidden_layers": 4, "vocab_size": 240}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def rollouts(sequences: int = SEQUENCES, completion: int = COMPLETION) -> list[Rollout]:
    """Sequences with prompts, log-probs and advantages of their own."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for i, ids in enumerate(torch.randint(0, 240, (sequences, PROMPT + completion), generator=draw).tolist()):
        feature = InputFeature(prompt_ids=tuple(ids[:PROMPT]), completion_ids=tuple(ids[PROMPT:]))
        (rollout,) = as_rollouts([feature])
        trajectory = replace(rollout.trajectory, logps=(-5.0,) * completion)
        made.append(replace(rollout, trajectory=trajectory, advantage=1.0 if i % 2 else -1.0))
    return made


def count(case: str, ranks: Any) -> dict[str, Any]:
    """One update on this rank; what it counted, and the formula."""
    from gruppo.model.rank_part import ShardedModel
    from gruppo.model.ranked import RankedModel

    options = {"exact": False, "dtype": "float32"} | CASES[case]
    beta = options.pop("beta", 0.0)
    part = ShardedModel(
        small_model(),
        ranks=ranks,
        device="cpu",
        layout="padded",
        tokens_per_microbatch=TOKENS,
        **options,
    )
    part.set_loss(GRPOLoss(beta=beta))
    part.spread(keeps_copy=False)
    part.set_optimizer("AdamW", lr=1e-4)
    model = RankedModel(part, deadline_s=120)
    step = rollouts()
    counted = Counted()
    with counted:
        if ranks.rank == 0:
            plan = model.plan(step)
            model.run(plan)
            model.clip_grad_and_step(1.0)
            model.calculate_metric()
            ranks.broadcast({"call": "end", "code": 0})
        else:
            model.follow()
    rounds = -(-(SEQUENCES // 3) // ranks.world)  # micro-batches of three sequences
    formula = traffic(model.model, ranks=ranks.world, dtype=model.dtype, has_reference=bool(beta))
    message = message_bytes(
        prompt_tokens=SEQUENCES * PROMPT, completion_tokens=SEQUENCES * COMPLETION, sequences=SEQUENCES
    )
    share = (ranks.world - 1) / ranks.world
    size = counted.bytes
    sent = {
        "gathered": size["all-gather"] * share, "reduced": (size["reduce-scatter"] + size["all-to-all"]) * share,
        "message": size["broadcast"], "other": size["all-reduce"] * 2 * share,
    }  # fmt: skip
    return {
        "case": case, "ranks": ranks.world, "rounds": rounds, "calls": dict(counted.calls), "sent": sent,
        "formula": {"gathered": rounds * formula.gathered, "reduced": rounds * formula.reduced, "message": message},
    }  # fmt: skip


def on_ranks(world: int, command: list[str]) -> list[Any]:
    """What each of so many ranks, started with this command, wrote as JSON to the file that comes after it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    usual = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    usual |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(world)]
        started = [
            subprocess.Popen([sys.executable, *command, str(out)], env=os.environ | usual | {"RANK": str(rank)})
            for rank, out in enumerate(outs)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads(out.read_text()) for out in outs]


def rank_main(out: Path, cases: list[str]) -> None:
    import torch.distributed as dist

    from gruppo.parallel.ranks import join

    torch.set_num_threads(1)
    ranks = join(120)
    out.write_text(json.dumps([count(case, ranks) for case in cases]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, help="write the counts to this file as JSON")
    parser.add_argument("--rank-to", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_to is not None:
        return rank_main(given.rank_to, given.cases)
    rows = []
    for world in given.ranks:
        found = on_ranks(world, [__file__, "--cases", *given.cases, "--rank-to"])
        assert all(each == found[0] for each in found), "ranks counted differently"
        rows += found[0]
    print("KiB that each rank sends in an update, counted (by formula), and how many collectives there are")
    print(f"{'':11}{'ranks':>6}{'rounds':>7}{'gathered':>24}{'reduced':>24}{'message':>24}{'other':>7}")
    for row in rows:
        sent, formula = row["sent"], row["formula"]
        text = "".join(f"{sent[name] / 1024:,.1f} ({formula[name] / 1024:,.1f})".rjust(24) for name in formula)
        calls = ", ".join(f"{n} {kind}" for kind, n in row["calls"].items())
        print(f"{row['case']:11}{row['ranks']:6}{row['rounds']:7}{text}{sent['other'] / 1024:7.1f}  {calls}")
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
