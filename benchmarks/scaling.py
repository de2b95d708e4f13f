"""Time of a step on many GPUs: a calculation, whose parts are measured on few processes.

    python benchmarks/scaling.py              # 8 to 512 GPUs, calculated: nothing of it was run
    python benchmarks/scaling.py --measure    # 1, 2 and 4 processes over gloo: calculated from parts, and measured

An update is rounds of micro-batches; each computes, gathers weights and reduces gradients, as much as
`communication.traffic` says. Before it the first rank sends the step to all, after it come the optimizer and the
weights' way to the samplers. Sampling is a simulation of decoding with slots, in which the longest completion is what
no number of GPUs shortens. What the calculation leaves out: attention's own products, prefill, rewards, evaluation,
checkpoints, stragglers and lost GPUs.
"""

import argparse
import heapq
import json
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from communication import PROMPT, Traffic, message_bytes, on_ranks, rollouts, small_model, traffic
from torch import nn

GB = 1e9
MEMORY = 141 * GB
"""Of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Assumptions about the machines. Measured: `flops` and `compute_share` on one H200, `per_token` on a CPU core."""

    flops: float = 790e12
    """FLOP/s of a large bfloat16 product."""
    compute_share: float = 0.47
    """Of that in training: docs/benchmarks.md for 8B with recomputation, whose extra forward is not counted."""
    memory: float = 4300 * GB
    """Bytes per second of a GPU's memory."""
    decode_share: float = 0.7
    """Of that while decoding."""
    gpus_per_node: int = 8
    nvlink: float = 450 * GB
    """Bytes per second that a GPU sends within its node."""
    network: float = 8 * 50 * GB
    """Bytes per second that a node sends to others: rings of 8 GPUs use 8 cards of 400 Gb/s."""
    link_share: float = 0.8
    """Of those rates in collectives."""
    hop: float = 3e-6
    """Seconds per rank of a ring before its data flow."""
    overlap: float = 0.9
    """Of the shorter of computing and communication, the share that is hidden behind the longer."""
    control: float = 1 * GB
    """Bytes per second of messages, over TCP, each rank passing it on to one more at a time."""
    per_token: float = 330e-9
    """Seconds in which Python packs a token of the step on the first rank and unpacks it on the others."""
    storage: float = 10 * GB
    """Bytes per second at which all ranks write the weights, and samplers read them, through files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Assumptions about the step."""

    prompts: int = 512
    group_size: int = 16
    prompt_tokens: int = 500
    mean_completion: int = 2000
    longest_completion: int = 16384
    tokens_per_microbatch: int = 16384

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def microbatches(self) -> int:
        tokens = self.prompts * self.prompt_tokens + self.sequences * self.mean_completion  # a shared prompt once
        return math.ceil(tokens / self.tokens_per_microbatch)


# --- update -----------------------------------------------------------------------------------------------------------


def update_seconds(*, rounds: int, compute: float, communication: float, overlap: float, once: float) -> float:
    """Seconds of an update: rounds of micro-batches, and what there is once."""
    hidden = overlap * min(compute, communication)
    return rounds * (compute + communication - hidden) + once


def collectives_seconds(sent: Traffic, calls: int, ranks: int, cluster: Cluster) -> float:
    """Seconds of the collectives of a micro-batch over rings through all ranks."""
    rate = cluster.nvlink if ranks <= cluster.gpus_per_node else min(cluster.nvlink, cluster.network)
    return (sent.gathered + sent.reduced) / (rate * cluster.link_share) + calls * (ranks - 1) * cluster.hop


def training_seconds(model: nn.Module, ranks: int, work: Work, cluster: Cluster) -> float:
    """Seconds from rollouts to weights that samplers can read, all weights trained in bfloat16 on ranks."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers: int = model.config.num_hidden_layers  # type: ignore[union-attr,assignment]
    sent = traffic(model, ranks=ranks, dtype=torch.bfloat16)
    completion_tokens = work.sequences * work.mean_completion
    message = message_bytes(
        prompt_tokens=work.prompts * work.prompt_tokens, completion_tokens=completion_tokens, sequences=work.sequences
    )
    once = message / cluster.control * math.ceil(math.log2(ranks)) + completion_tokens * cluster.per_token
    once += 28 * parameters / ranks / cluster.memory  # Adam reads four numbers of a parameter and writes three
    once += 2 * parameters / cluster.storage
    return update_seconds(
        rounds=math.ceil(work.microbatches / ranks),
        compute=6 * parameters * work.tokens_per_microbatch / (cluster.flops * cluster.compute_share),
        communication=collectives_seconds(sent, 3 * layers + 2, ranks, cluster),
        overlap=cluster.overlap,
        once=once,
    )


# --- sampling ---------------------------------------------------------------------------------------------------------


@cache
def active_rows(work: Work, engines: int, slots: int) -> tuple[int, ...]:
    """Rows that decode at each token step on the engine that has the longest completion.

    Lengths are quantiles of an exponential distribution, cut at the longest. A free slot takes the next sequence.
    """
    quantiles = [(i + 0.5) / work.sequences for i in range(work.sequences)]
    lengths = [min(math.ceil(-work.mean_completion * math.log(1 - q)), work.longest_completion) for q in quantiles]
    own = lengths[::-1][::engines]
    random.Random(0).shuffle(own)
    free, change = [0] * min(slots, len(own)), Counter[int]()
    for length in own:
        start = heapq.heappop(free)
        heapq.heappush(free, start + length)
        change.update({start: 1})
        change.subtract({start + length: 1})
    return tuple(accumulate(change[step] for step in range(max(change))))


def sampling_seconds(model: nn.Module, gpus: int, work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds to read the weights and sample a step, and GPU-seconds that it took with every slot always in use.

    Engines have as many GPUs as leave room for keys and values.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shape: Any = model.config
    engine = 1 if 2 * parameters < 60 * GB else 4
    per_token = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim  # keys and values
    # What is left of an exponential length has its mean, and so has what is done of it.
    per_row = per_token * (work.prompt_tokens + work.mean_completion)
    slots = int((engine * 0.85 * MEMORY - 2 * parameters) / per_row)
    rate = engine * cluster.memory * cluster.decode_share
    rows = active_rows(work, max(gpus // engine, 1), slots)
    decoding = sum((2 * parameters + active * per_row) / rate for active in rows)
    at_best = work.sequences * work.mean_completion / slots * (2 * parameters + slots * per_row) / rate * engine
    return decoding + 2 * parameters / cluster.storage, at_best


# --- table ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def shape(name: str) -> nn.Module:
    """A model of a size, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SHAPES[name], **usual))


def table(work: Work, cluster: Cluster, numbers: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)) -> list[str]:
    """Step times by the number of GPUs, where all weights and a micro-batch fit with recomputation.

    The share is what the GPUs would need for the step if they did nothing but training products and decoding with all
    slots in use, over what they take.
    """
    titles = {"": 4, "GPUs": 6, "update, all train": 20, "one after the other": 22, "max_staleness 1": 18}
    lines = ["".join(f"{title:>{width}}" for title, width in titles.items()) + "   of which train"]
    for name in SHAPES:
        model = shape(name)
        products = 6 * sum(parameter.numel() for parameter in model.parameters()) * work.microbatches
        products *= work.tokens_per_microbatch / (cluster.flops * cluster.compute_share)
        for gpus in numbers:
            splits = [n for n in range(gpus // 8, gpus, gpus // 8) if fits(model, n, work)]
            if not splits:
                continue
            update = training_seconds(model, gpus, work, cluster)
            sampling, decoding = sampling_seconds(model, gpus, work, cluster)
            ahead, train = min(
                (max(training_seconds(model, n, work, cluster), sampling_seconds(model, gpus - n, work, cluster)[0]), n)
                for n in splits
            )
            needed = (products, products + decoding, products + decoding)
            times = (update, update + sampling, ahead)
            texts = [f"{each:.0f} s {x / each / gpus:5.0%}" for each, x in zip(times, needed, strict=True)]
            lines.append(f"{name:>4}{gpus:6}{texts[0]:>20}{texts[1]:>22}{texts[2]:>18}{train:17}")
    return lines


def fits(model: nn.Module, ranks: int, work: Work) -> bool:
    """Does a rank's part of the training fit into the memory of a GPU?"""
    from gruppo.trainer import TrainConfig
    from gruppo.trainer.estimate import training_memory

    config = TrainConfig(gradient_checkpointing=True)
    memory = training_memory(config, model, tokens=work.tokens_per_microbatch, dtype=torch.bfloat16, ranks=ranks)
    return memory.total < MEMORY


# --- measured ---------------------------------------------------------------------------------------------------------


REPEATS, SEQUENCES, COMPLETION = 9, 12, 48
"""Times that everything is measured, sequences of the update, each a micro-batch, and tokens of their completions."""


def measure(ranks: Any) -> dict[str, float]:
    """Seconds of an update on these ranks, and of its parts, each for itself with all ranks at it."""
    import torch.distributed as dist

    from gruppo.loss import GRPOLoss
    from gruppo.model import TransformersModel
    from gruppo.model.compiled_blocks import find_blocks
    from gruppo.model.rank_part import ShardedModel
    from gruppo.model.ranked import packed, unpacked

    world, step = ranks.world, rollouts(SEQUENCES, COMPLETION)
    rounds = SEQUENCES // world
    usual = {"device": "cpu", "layout": "padded", "tokens_per_microbatch": PROMPT + COMPLETION, "dtype": "float32"}
    alone = TransformersModel(small_model(512, 1024), **usual)  # type: ignore[arg-type]
    model = ShardedModel(small_model(512, 1024), ranks=ranks, exact=False, **usual)
    sizes = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model.logp_model.base)]
    whole = sum(parameter.numel() for parameter in model.model.parameters())
    groups = [*sizes, whole - sum(sizes)]
    for each in (alone, model):
        each.set_loss(GRPOLoss())
    model.spread(keeps_copy=False)
    for each in (alone, model):
        each.set_optimizer("AdamW", lr=1e-4)
    rows, copies = torch.zeros(max(groups)), torch.zeros(max(groups))

    def gather() -> None:
        """As FSDP does it: the rows of all ranks side by side, then copied into parameters."""
        for size in (*groups, *sizes):
            own = size // world
            dist.all_gather_into_tensor(rows[: own * world], copies[:own])
            copies[: own * world].copy_(rows[: own * world])

    def reduce() -> None:
        """As FSDP does it: gradients copied side by side, then reduced, then added."""
        for size in groups:
            own = size // world
            rows[: own * world].copy_(copies[: own * world])
            dist.reduce_scatter_tensor(copies[:own], rows[: own * world])
            copies[:own].add_(copies[:own])

    def message() -> None:
        if ranks.rank == 0:
            ranks.broadcast({"call": "plan"}, packed(step))
        else:
            unpacked(ranks.receive()[1])

    def compute() -> None:
        alone.run(alone.plan(step[:rounds]))

    def whole_update() -> None:
        message()
        model.run(model.plan(step))
        model.clip_grad_and_step(1.0)
        model.weights.zero_grad()

    parts = {"gather": gather, "reduce": reduce, "message": message, "compute": compute}
    parts |= {"optimizer": lambda: alone.clip_grad_and_step(1.0), "update": whole_update}
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(REPEATS + 1):
        for name, call in parts.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            dist.barrier()
            found[name].append(time.perf_counter() - started)
        alone.weights.zero_grad()
    shortest = {name: min(values[1:]) for name, values in found.items()}  # a busy machine only adds
    calculated = update_seconds(
        rounds=rounds,
        compute=shortest["compute"] / rounds,
        communication=shortest["gather"] + shortest["reduce"],
        overlap=0.0,  # gloo's threads and the products share the cores
        once=shortest["message"] + shortest["optimizer"] / world,
    )
    return shortest | {"calculated": calculated}


def rank_main(out: Path) -> None:
    import torch.distributed as dist

    from gruppo.parallel.ranks import join

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for collectives that 2.11 lacks
    out.write_text(json.dumps(measure(join(300))))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="small cases on this machine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rank-to", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_to is not None:
        rank_main(given.rank_to)
    elif given.measure:
        print(f"seconds, the shortest of {REPEATS}; {SEQUENCES} micro-batches, of which a rank computes its share")
        for world in given.ranks:
            row = on_ranks(world, [__file__, "--rank-to"])[0]
            off = row["calculated"] / row["update"] - 1
            print(f"{world} rank(s)  " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()) + f"  off by {off:+.0%}")
    else:
        print("\n".join(table(Work(), Cluster())))


if __name__ == "__main__":
    main()
