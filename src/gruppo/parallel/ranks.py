"""Ranks: processes that share a step, and reductions over the groups of a mesh, or over none in a run of one process.

Every rank holds the whole step and plans it alike; the micro-batches are dealt out. All ranks run the same number of
forwards and backwards, idle ones included, because the collectives of a sharded model wait for all of them.

`join` makes the ranks of what torchrun, or anything that sets the same variables, has started. Numbers are reduced over
the group of the device; messages go over a second group. All waits end at the deadline, but for that of a listener for
the next message, which may come after hours. A message is JSON with tensors in the format of safetensors: nothing is
unpickled.
"""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from gruppo.errors import InputError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process group; one process alone without a group."""

    group: "ProcessGroup | None" = None
    control: "ProcessGroup | None" = None
    """Of the same ranks, for messages."""
    store: "Store | None" = None
    """Store in which a rank leaves the error that it ends with."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def deal(self, items: Sequence[T], idle: T) -> list[T]:
        """This rank's share of the items, as many on every rank; `idle` where there are too few.

        >>> Ranks().deal(["a", "b", "c"], "idle")
        ['a', 'b', 'c']
        """
        share = list(items[self.rank :: self.world])
        return share + [idle] * (-(-len(items) // self.world) - len(share))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return values if self.group is None else sum_over([self.group], values)

    def in_order(self, rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The numbers of all micro-batches in the order of the plan, from those of this rank's share.

        Every rank has as many rows; an idle one may lack names, and counts 0 there. The first row is the first rank's.
        """
        if self.group is None or not rows:
            return [dict(row) for row in rows]
        kinds = json.loads(self._first_text(json.dumps({name: str(x.dtype)[6:] for name, x in rows[0].items()})))
        device, zero = reduction_device([self.group]), torch.zeros((), dtype=torch.float64)
        own = torch.stack([torch.stack([row.get(name, zero).double().to(device) for name in kinds]) for row in rows])
        everyone = gather_over([self.group], own).transpose(0, 1).flatten(0, 1)
        return [
            {name: row[i].to(getattr(torch, kind)) for i, (name, kind) in enumerate(kinds.items())} for row in everyone
        ]

    def _first_text(self, text: str) -> str:
        """The text of the first rank."""
        assert self.group is not None
        device = reduction_device([self.group])
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        size = torch.tensor([len(own)], device=device)
        dist.broadcast(size, group_src=0, group=self.group)
        own = own if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(own, group_src=0, group=self.group)
        return own.cpu().numpy().tobytes().decode()

    def broadcast(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message from the first rank to all others, which `receive` it."""
        blob = _blob(message, tensors or {})
        size = torch.tensor([len(blob)])
        for sent in [dist.isend(size, rank, group=self.control) for rank in range(1, self.world)]:
            assert sent is not None
            sent.wait()
        dist.broadcast(blob, 0, group=self.control)

    def receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next message of the first rank."""
        size = torch.zeros(1, dtype=torch.int64)
        coming = dist.irecv(size, 0, group=self.control)
        assert coming is not None
        coming.wait(WAIT)
        blob = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(blob, 0, group=self.control)
        return _message(blob)

    def gather(
        self, message: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
        """The messages of all ranks, in their order."""
        own = _blob(message, tensors)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.control)
        longest = int(torch.cat(sizes).max())
        blobs = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(blobs, torch.nn.functional.pad(own, (0, longest - len(own))), group=self.control)
        return [_message(blob[: int(size)]) for blob, size in zip(blobs, sizes, strict=True)]

    def note_error(self, code: int, text: str) -> None:
        """Leave an error for the other ranks to report."""
        with suppress(RuntimeError):  # the store may be lost with the first rank
            if self.store is not None:
                self.store.set(f"error/{self.rank}", json.dumps({"code": code, "text": text}))

    def error_of_others(self) -> tuple[int, str] | None:
        """Exit code and text of the first other rank that failed by itself, rather than by losing others."""
        for rank in range(self.world):
            if self.store is not None and rank != self.rank and self.store.check([f"error/{rank}"]):
                found = json.loads(self.store.get(f"error/{rank}"))
                if found["code"] != RankError.exit_code:
                    return int(found["code"]), f"rank {rank}: {found['text']}"
        return None

    def missing(self) -> str:
        """Names of the ranks that do not answer, in words. Every rank that still answers calls this and leaves a
        sign."""
        assert self.store is not None
        self.store.set_timeout(timedelta(seconds=ANSWER_S))
        self.store.set(f"here/{self.rank}", "")
        lost, end = list(range(self.world)), time.monotonic() + ANSWER_S
        while lost and time.monotonic() < end:
            time.sleep(0.1)
            signs = ("here", "error")
            lost = [r for r in lost if not any(self.store.check([f"{sign}/{r}"]) for sign in signs)]
        return f"rank {', '.join(map(str, lost))} does not answer" if lost else "all ranks answer"

    def lost(self, during: str, error: BaseException, remedy: str) -> RankError:
        """The error for a collective that failed: what another rank has left as its own, or which one is missing."""
        noted = None
        try:
            reason, noted = self.missing(), self.error_of_others()
        except RuntimeError:  # the store is gone
            reason = "rank 0 does not answer"
        lost = RankError(
            f"the ranks lost each other in {during}: {noted[1] if noted else reason}. {remedy} "
            f"({' '.join(str(error).split())[:200]})"
        )
        lost.exit_code = noted[0] if noted else RankError.exit_code
        return lost

    def highest(self, value: int) -> int:
        """The largest value of all ranks."""
        return int(max_over([self.control] if self.control is not None else [], torch.tensor([value])))


START = timedelta(minutes=10)
"""Timeout for the ranks to find each other."""
ANSWER_S = 5.0
"""Seconds that a rank has to answer once another has waited for it in vain."""
WAIT = timedelta(days=30)
"""Timeout of a listener for the next message; long, because the first rank may sample for hours."""


def world_of_launcher() -> int:
    """Processes that a launcher has started, this one among them; 1 without a launcher."""
    given = os.environ.get("WORLD_SIZE", "1")
    return int(given) if given.isdigit() and int(given) else 1


def join(deadline_s: float) -> Ranks:
    """The ranks that a launcher has started: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are theirs.

    Args:
        deadline_s: how long a rank waits for the others in a collective of the model.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that a launcher has started several processes, and "
            f"{', '.join(missing)} is not set; start them with torchrun ... -m gruppo train, or unset WORLD_SIZE"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend, deadline = "nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=deadline_s)
    store, world = None, 0
    is_joined = dist.is_initialized()  # by Ray Train
    try:
        if is_joined:
            store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, rank, world = next(rendezvous("env://", timeout=min(START, deadline)))
        store.set_timeout(START)
        # torchrun's store outlives a restart, and the addresses in it do not.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"came/{rank}", "")
        options: dict[str, Any] = {"store": PrefixStore("groups", store), "rank": rank, "world_size": world}
        if not is_joined:
            dist.init_process_group(backend, timeout=deadline, **options)
        control = dist.new_group(backend="gloo", timeout=deadline)
    except RuntimeError as error:
        raise RankError(
            f"the ranks have not found each other: {_not_come(store, world)}. Start them again, with a higher "
            f"rank_deadline if some begin later than others ({' '.join(str(error).split())[:200]})"
        ) from error
    return Ranks(dist.group.WORLD, control, store)  # type: ignore[arg-type]  # no rank is outside of it


def _not_come(store: "Store | None", world: int) -> str:
    """Names of the ranks that have not begun, in words."""
    with suppress(RuntimeError):  # the store is gone
        if store is not None:
            late = [str(rank) for rank in range(world) if not store.check([f"came/{rank}"])]
            return f"rank {', '.join(late)} has not come" if late else "all have come, and one does not answer"
    return f"not all of them have come to {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def leave(ranks: Ranks, code: int, *, is_lost: bool) -> None:
    """End the run on this rank. The first one sends the others home with its exit code, unless a rank `is_lost`."""
    if is_lost:
        return
    if ranks.rank == 0:
        # Those that have ended cannot hear it, and those that hang do not.
        telling = threading.Thread(target=_end, args=(ranks, code), daemon=True)
        telling.start()
        telling.join(ANSWER_S)
        if telling.is_alive():
            return
    dist.destroy_process_group()


def _end(ranks: Ranks, code: int) -> None:
    with suppress(RuntimeError):
        ranks.broadcast({"call": "end", "code": code})


def is_of_ranks(error: BaseException) -> bool:
    """True if an error comes from a collective: another process ended, hangs or is late."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _blob(message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    from safetensors.torch import save

    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    whole = {"message": text} | {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    return torch.frombuffer(bytearray(save(whole)), dtype=torch.uint8)


def _message(blob: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors.torch import load

    tensors = load(blob.numpy().tobytes())
    return json.loads(tensors.pop("message").numpy().tobytes()), tensors


def groups_of(device_mesh: "DeviceMesh | None", process_group: "ProcessGroup | None") -> list["ProcessGroup"]:
    """The groups to reduce over, innermost first. An explicit group wins; without either nothing is reduced."""
    if process_group is not None:
        return [process_group]
    if device_mesh is not None:
        return list(reversed(device_mesh.get_all_groups()))
    return []


def reduction_device(groups: list["ProcessGroup"]) -> torch.device:
    """Device for the zeros of a rank that has seen no data, because NCCL reduces only tensors on a GPU."""
    if any(dist.get_backend(group) == "nccl" for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    return _reduced(groups, values, dist.ReduceOp.SUM)


def max_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    return _reduced(groups, values, dist.ReduceOp.MAX)


def gather_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    """The tensors of all ranks, stacked along a new first axis in rank order (`[1, ...]` without groups)."""
    stacked = values[None]
    for group in groups:
        parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, stacked.contiguous(), group=group)
        stacked = torch.cat(parts)
    return stacked


def _reduced(groups: list["ProcessGroup"], values: Tensor, operation: "dist.ReduceOp.RedOpType") -> Tensor:
    reduced = values.clone()
    for group in groups:
        dist.all_reduce(reduced, operation, group=group)
    return reduced
