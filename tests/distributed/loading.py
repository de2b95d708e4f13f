"""A model loaded on one of several ranks: `python loading.py RANK WORLD PORT MODEL OUT`.

What the rank holds goes to a file: bytes of its weights, and the most memory that it took while it loaded them.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gruppo.model.optim import local
from gruppo.model.rank_part import ShardedModel
from gruppo.parallel.ranks import Ranks, join


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most memory since it was made, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, anonymous())
            time.sleep(0.002)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.most - self.before


def load(model: str, ranks: Ranks) -> ShardedModel:
    options: dict[str, Any] = {"dtype": "float32", "tokens_per_microbatch": 96}
    made = ShardedModel(model, ranks=ranks, exact=True, **options)
    made.spread(keeps_copy=False)
    return made


def main() -> None:
    rank, world, port, model, out = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = join(120)
    load("builtin", ranks)  # imports take memory too
    peak = Peak()
    made = load(model, ranks)
    facts = {"peak": peak.stop(), "held": sum(local(p).nbytes for p in made.model.parameters())}
    Path(out, rank).write_text(json.dumps(facts))
    ranks.highest(0)
    torch.distributed.destroy_process_group()
    os._exit(0)  # as the command does: torch's threads may outlive the interpreter


if __name__ == "__main__":
    main()
