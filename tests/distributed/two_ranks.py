"""One rank of `test_metric_two_ranks.py`, run as `python two_ranks.py RANK FOLDER`: every scenario, results as JSON.

Also holds the data and the scenarios, which the test needs to compute the answer of a single process.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric

SEQUENCES, WIDTH = 9, 11

# name -> (class, options, how the ranks are named, sequences of rank 0; rank 1 has the rest)
SCENARIOS = {
    **{
        f"{cls.__name__}, {how}, {share} of 9": (cls, {"top_k_kl": 6}, how, share)
        for cls in (GRPOMetric, GSPOMetric, CISPOMetric)
        for how in ("process_group", "device_mesh")
        for share in (4, 1)
    },
    "rank 1 is empty": (GRPOMetric, {"top_k_kl": 6}, "process_group", 9),
    "rank 0 is empty": (GRPOMetric, {"top_k_kl": 6}, "device_mesh", 0),
    "without top-K": (GRPOMetric, {}, "process_group", 4),
    "more K than tokens": (GRPOMetric, {"top_k_kl": 500}, "process_group", 4),
    "temperature and bounds": (GRPOMetric, {"temperature": 0.7, "epsilon": 0.1, "epsilon_high": 0.3}, "device_mesh", 5),
    "mesh of two axes": (GRPOMetric, {"top_k_kl": 6}, "device_mesh of two axes", 4),
}


def data():
    """Padded rows in float32. Log-probs are coarse, so that many tokens tie for the top-K, across the ranks too."""
    draw = torch.Generator().manual_seed(7)
    shape = SEQUENCES, WIDTH
    normal = lambda: torch.randn(shape, generator=draw)  # noqa: E731
    scored = torch.rand(shape, generator=draw) < 0.7
    return {
        "labels": torch.where(scored, torch.randint(0, 99, shape, generator=draw), -100),
        "logps": (normal() - 2).mul(4).round() / 4,
        "old": (normal() - 2).mul(4).round() / 4,
        "entropies": normal().abs(),
        "advantages": torch.randn(SEQUENCES, generator=draw),
    }


def accumulate(metric, rows):
    metric.accumulate(
        {"labels": rows["labels"]},
        {"logps": rows["logps"], "entropies": rows["entropies"]},
        old_logps=rows["old"],
        advantages=rows["advantages"],
    )


class Counter:
    """Counts the calls of a collective, and makes them."""

    def __init__(self, name):
        self.calls, self.collective = 0, getattr(dist, name)
        setattr(dist, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.collective(*args, **kwargs)


def run(rank, scenario, counters):
    cls, options, how, share = SCENARIOS[scenario]
    groups = {
        "process_group": lambda: {"process_group": dist.group.WORLD},
        "device_mesh": lambda: {"device_mesh": init_device_mesh("cpu", (2,))},
        "device_mesh of two axes": lambda: {"device_mesh": init_device_mesh("cpu", (2, 1))},
    }[how]()
    metric = cls(**groups, **options)
    first, last = (0, share) if rank == 0 else (share, SEQUENCES)
    everything = data()
    for i in range(first, last, 2):  # micro-batches of at most two; an empty rank never accumulates
        accumulate(metric, {name: value[i : min(i + 2, last)] for name, value in everything.items()})
    before = {name: counter.calls for name, counter in counters.items()}
    results = metric.calculate()
    calls = {name: counter.calls - before[name] for name, counter in counters.items()}
    if rank == 0 and share:  # reporting must have left the states of the ranks as they were
        accumulate(metric, {name: value[:share] for name, value in everything.items()})
    return {"results": results, "later": metric.calculate(), "calls": calls}


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=200)
    )
    counters = {name: Counter(name) for name in ("all_reduce", "all_gather")}
    answers = {scenario: run(rank, scenario, counters) for scenario in SCENARIOS}
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
