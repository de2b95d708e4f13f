"""RankedModel: a model on several ranks, used as if it were in one process.

The first rank runs the trainer: prompts, sampling, rewards and files. The others wait in `follow`. A call on the first
rank that needs the weights is sent to all, with the whole step in it; each rank then makes it on its part of the model.
So nothing of the trainer is written for ranks, and every rank comes to the same numbers.
"""

import faulthandler
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gruppo import faults
from gruppo.batch.packed import as_rollouts
from gruppo.errors import CheckpointError, NumericError
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.model.logp_model import LogpModel
from gruppo.model.lora import LoraSpec
from gruppo.model.optim import MasterWeights, StepReport
from gruppo.model.plan import StepPlan
from gruppo.model.rank_part import RankPart
from gruppo.model.reference import Reference
from gruppo.model.transformers_model import Record, Sequences, TransformersModel
from gruppo.parallel.ranks import is_of_ranks
from gruppo.types import Prompt, Rollout, Trajectory
from gruppo.weights.files import Entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds that a rank stays after its deadline, so that those that wait for it report it first."""
RESUME = "Go on from the last checkpoint with `gruppo resume`"
OF_SHARDS = ("trained", "write_weights", "save_state")
"""Calls that a rank with all weights makes alone."""
OF_FILES = ("write_weights", "save_state", "load_state")
"""Calls that may fail on a disk. They fail on all ranks; the first reports it, and goes on or ends the run."""

Columns = tuple[tuple[int, ...], Sequence[int], dict[str, Tensor]]
"""What `Record` is given."""


class RankedModel:
    """The actor on several ranks.

    Args:
        part: this rank's part of it, ready to train.
        deadline_s: how long one call may take.
        share_signal: is given the signal that some rank has got, 0 for none; returns that of this rank.
    """

    def __init__(
        self, part: RankPart, *, deadline_s: float, share_signal: Callable[[int], int] = lambda seen: seen
    ) -> None:
        self.part, self.ranks = part, part.ranks
        self.deadline_s, self.share_signal = deadline_s, share_signal
        self._planned: StepPlan | None = None
        self._calls: dict[str, Callable[..., Any]] = {
            "forward_only": part.forward_only,
            "reference_logps": part.reference_logps,
            "plan": self._plan,
            "run": self._run,
            "clip_grad_and_step": self._step,
            "calculate_metric": part.calculate_metric,
            "set_entropy_coef": self._set_entropy_coef,
            "trained": part.trained,
            "write_weights": lambda folder: part.write_weights(Path(folder)),
            "save_state": lambda folder: part.save_state(Path(folder)),
            "load_state": self._load_state,
        }

    def _on_all(self, call: str, rollouts: Sequence[Rollout] | None = None, **arguments: Any) -> Any:
        """Make a call on all ranks; what it gives on this one."""
        if call in OF_SHARDS and self.part.num_shards == 1:
            return self._calls[call](**arguments)
        try:
            if self.ranks.rank == 0:
                tensors = None if rollouts is None else packed(rollouts)
                self.ranks.broadcast({"call": call, **arguments}, tensors)
            faulthandler.dump_traceback_later(self.deadline_s + GRACE_S, exit=True)
            return self._calls[call](*([] if rollouts is None else [rollouts]), **arguments)
        except RuntimeError as error:
            if not is_of_ranks(error):
                raise
            raise self.ranks.lost(f"`{call}` after version {self.version}", error, RESUME) from error
        finally:
            faulthandler.cancel_dump_traceback_later()

    def follow(self) -> int:
        """Do this rank's part of all calls until the first rank ends the run; its exit code."""
        while True:
            try:
                message, tensors = self.ranks.receive()
            except RuntimeError as error:
                raise self.ranks.lost("a message of the first rank", error, RESUME) from error
            call = message.pop("call")
            if call == "end":
                return int(message["code"])
            with suppress(*((CheckpointError, NumericError, OSError) if call in OF_FILES else ())):
                self._on_all(call, unpacked(tensors) if tensors else None, **message)

    # --- calls, as of `TransformersModel` -----------------------------------------------------------------------------

    def forward_only(self, inputs: Sequences, *, temperature: float | None = None) -> dict[str, list[Tensor]]:
        return self._on_all("forward_only", as_rollouts(inputs), temperature=temperature)

    def reference_logps(self, inputs: Sequences) -> list[Tensor]:
        return self._on_all("reference_logps", as_rollouts(inputs))

    def plan(self, rollouts: Sequence[Rollout]) -> StepPlan:
        return self._on_all("plan", rollouts, version=self.version, measures_gap=self.measures_gap)

    def _plan(self, rollouts: Sequence[Rollout], version: int, measures_gap: bool) -> StepPlan:
        self.part.version, self.part.measures_gap = version, measures_gap
        self._planned = self.part.plan(rollouts)
        return self._planned

    def run(self, plan: StepPlan, record: Record | None = None) -> LossOutput:
        assert plan is self._planned  # which the other ranks have too
        output, columns = self._on_all("run", records=record is not None)
        if record is not None:
            for each in columns:
                record(*each)
        return output

    def _run(self, records: bool) -> tuple[LossOutput, list[Columns]]:
        """The step that was planned, and what all ranks have seen of their micro-batches."""
        if self.ranks.rank:
            faults.reach("follow", self.version)
        assert self._planned is not None
        seen: list[Columns] = []
        output = self.part.run(self._planned, record=(lambda *columns: seen.append(columns)) if records else None)
        return output, self._gathered([columns for columns in seen if columns[0]]) if records else []

    def _gathered(self, seen: list[Columns]) -> list[Columns]:
        facts = [{"indices": i, "lengths": list(lengths), "names": list(columns)} for i, lengths, columns in seen]
        tensors = {f"{n}.{name}": x for n, (_, _, columns) in enumerate(seen) for name, x in columns.items()}
        return [
            (tuple(part["indices"]), part["lengths"], {name: found[f"{n}.{name}"] for name in part["names"]})
            for message, found in self.ranks.gather({"parts": facts}, tensors)
            for n, part in enumerate(message["parts"])
        ]

    def clip_grad_and_step(self, max_grad_norm: float | None = 1.0) -> StepReport:
        return self._on_all("clip_grad_and_step", max_grad_norm=max_grad_norm)

    def _step(self, max_grad_norm: float | None) -> StepReport:
        report = self.part.clip_grad_and_step(max_grad_norm)
        # A signal that any rank got is known to all once per update.
        self.share_signal(self.ranks.highest(self.share_signal(0)))
        return report

    def calculate_metric(self) -> dict[str, Any]:
        return self._on_all("calculate_metric")

    def set_loss(self, loss: PolicyLoss) -> None:
        """The loss as it is, with another coefficient of the entropy bonus: all that changes while a run goes on."""
        self._on_all("set_entropy_coef", value=loss.entropy_coef)

    def _set_entropy_coef(self, value: float) -> None:
        self.part.loss = self.part.loss.replace(entropy_coef=value)

    def trained(self) -> dict[str, Tensor]:
        return self._on_all("trained")

    def save(self, folder: str | Path) -> None:
        self.part.save(folder, write=self.write_weights)

    def write_weights(self, folder: Path) -> None:
        self._on_all("write_weights", folder=str(folder))

    def save_state(self, folder: Path) -> Entries:
        return self._on_all("save_state", folder=str(folder))

    def load_state(self, folder: Path) -> None:
        self._on_all("load_state", folder=str(folder))

    def _load_state(self, folder: str) -> None:
        refused = None
        try:
            self.part.load_state(Path(folder))
        except CheckpointError as error:
            refused = error
            if self.ranks.rank:
                logger.warning("rank %d: %s", self.ranks.rank, error)
        if self.ranks.highest(int(refused is not None)):
            raise refused or CheckpointError(f"another rank cannot read {folder}; its own log has the reason")

    # --- what this rank's part knows ----------------------------------------------------------------------------------

    def reference(self) -> Reference:
        return self.part.reference()

    def twin(self) -> TransformersModel:
        return self.part.twin()

    @property
    def model(self) -> nn.Module:
        return self.part.model

    @property
    def logp_model(self) -> LogpModel:
        return self.part.logp_model

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return self.part.tokenizer

    @property
    def device(self) -> torch.device:
        return self.part.device

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def lora(self) -> LoraSpec | None:
        return self.part.lora

    @property
    def quantized(self) -> dict[str, Any]:
        return self.part.quantized

    @property
    def weights(self) -> MasterWeights:
        return self.part.weights

    @property
    def loss(self) -> PolicyLoss:
        return self.part.loss

    @property
    def num_shards(self) -> int:
        return self.part.num_shards

    @property
    def copy_bytes(self) -> int:
        return self.part.copy_bytes

    @property
    def version(self) -> int:
        return self.part.version

    @version.setter
    def version(self, value: int) -> None:
        self.part.version = value

    @property
    def measures_gap(self) -> bool:
        return self.part.measures_gap

    @measures_gap.setter
    def measures_gap(self, value: bool) -> None:
        self.part.measures_gap = value


Actor = TransformersModel | RankedModel
"""What the trainer trains."""


def packed(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Rollouts as flat tensors: what a model reads of them. Prompts that are the same are sent once."""
    trajectories = [rollout.trajectory for rollout in rollouts]
    prompts = {trajectory.prompt_ids: None for trajectory in trajectories}
    number = {ids: i for i, ids in enumerate(prompts)}
    advantages = [rollout.advantage for rollout in rollouts]
    tensors = {
        "prompt": torch.tensor([number[t.prompt_ids] for t in trajectories], dtype=torch.int64),
        "is_masked": torch.tensor([rollout.is_masked for rollout in rollouts], dtype=torch.bool),
        "advantage": torch.tensor([0.0 if isinstance(a, tuple) else a for a in advantages], dtype=torch.float64),
    }
    ragged: dict[str, tuple[list[Any], torch.dtype]] = {
        "prompts": (list(prompts), torch.int64),
        "tokens": ([t.tokens for t in trajectories], torch.int64),
        "sampled": ([t.sampled for t in trajectories], torch.bool),
        "logps": ([t.logps for t in trajectories], torch.float64),
        "advantages": ([a if isinstance(a, tuple) else None for a in advantages], torch.float64),
        "old_logps": ([rollout.old_logps for rollout in rollouts], torch.float64),
        "ref_logps": ([rollout.ref_logps for rollout in rollouts], torch.float64),
    }
    for name, (values, dtype) in ragged.items():
        lengths = [-1 if value is None else len(value) for value in values]
        tensors[f"{name}.length"] = torch.tensor(lengths, dtype=torch.int64)
        flat = list(chain.from_iterable(value for value in values if value is not None))
        tensors[name] = torch.tensor(flat, dtype=dtype)
    return tensors


def unpacked(tensors: dict[str, Tensor]) -> list[Rollout]:
    """The rollouts that `packed` was given.

    >>> one = Rollout(trajectory=Trajectory(prompt=Prompt(token_ids=(1, 2)), tokens=(3,)), advantage=0.1)
    >>> unpacked(packed([one])) == [one]
    True
    """
    columns: dict[str, list[Any]] = {}
    for name in ("prompts", "tokens", "sampled", "logps", "advantages", "old_logps", "ref_logps"):
        lengths, values = tensors[f"{name}.length"].tolist(), iter(tensors[name].tolist())
        columns[name] = [None if n < 0 else tuple(next(values) for _ in range(n)) for n in lengths]
    prompts = [Prompt(token_ids=ids) for ids in columns["prompts"]]
    made = []
    for i, prompt in enumerate(tensors["prompt"].tolist()):
        own = {name: columns[name][i] for name in ("tokens", "sampled", "logps")}
        per_token = columns["advantages"][i]
        made.append(
            Rollout(
                trajectory=Trajectory(prompt=prompts[prompt], **own),
                is_masked=bool(tensors["is_masked"][i]),
                advantage=float(tensors["advantage"][i]) if per_token is None else per_token,
                old_logps=columns["old_logps"][i],
                ref_logps=columns["ref_logps"][i],
            )
        )
    return made
