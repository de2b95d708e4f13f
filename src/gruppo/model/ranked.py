"""RankedModel: a model that is sharded over ranks, used as if it were in one process.

The first rank runs the trainer: prompts, sampling, rewards and files. The others wait in `follow`. A call on the first
rank that needs the weights is sent to all, with the whole step in it; each rank then does its share of the
micro-batches. So nothing of the trainer is written for ranks, and every rank comes to the same numbers.
"""

import faulthandler
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gruppo import faults
from gruppo.batch import Totals
from gruppo.batch.packed import as_rollouts
from gruppo.errors import CheckpointError, InputError, NumericError
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.metric import Metric
from gruppo.model.checkpoint import write_generation_config, write_model
from gruppo.model.optim import MasterWeights, StepReport
from gruppo.model.plan import StepPlan
from gruppo.model.precision import half_or_float, in_precision
from gruppo.model.sharding import OrderedSum, RankWeights, ReplicatedWeights, ShardedWeights, like, shard, whole
from gruppo.model.shards import load_shards, read_weights, save_shards, write_whole
from gruppo.model.transformers_model import Record, Sequences, TransformersModel, Watch
from gruppo.parallel.ranks import Ranks, is_of_ranks
from gruppo.types import Prompt, Rollout, Trajectory
from gruppo.weights.files import Entries
from gruppo.weights.meta_load import NotByRows, load_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds that a rank stays after its deadline, so that those that wait for it report it first."""
RESUME = "Go on from the last checkpoint with `gruppo resume`"


class RankedModel(TransformersModel):
    """The actor on several ranks.

    Args:
        ranks: the processes, of which this is one.
        exact: give the bits of one process.
        deadline_s: how long one call may take.
        replicated: every rank keeps all weights, and gradients alone are added up over ranks.
        options: those of `TransformersModel`.
    """

    def __init__(
        self,
        model_id: Any,
        *,
        ranks: Ranks,
        exact: bool,
        deadline_s: float,
        replicated: bool = False,
        **options: Any,
    ) -> None:
        self._files: dict[str, Path] = {}
        """Of the weights, as long as they are not read; none where each rank has read all of them."""
        self.ranks, self.replicated, self.exact, lora = ranks, replicated, exact, options.get("lora")
        self._copies_modules = lora is not None and bool(lora.modules_to_save)
        dtype = half_or_float(options.pop("dtype", "auto"))
        # Shards are kept in float32; FSDP gathers them in the precision in which the model computes.
        loaded = "bfloat16" if replicated and dtype == torch.bfloat16 else "float32"
        super().__init__(model_id, process_group=ranks.group, dtype=loaded, **options)
        self.dtype = dtype
        self.ranks = self.planner.ranks = ranks
        self.deadline_s = deadline_s
        self.shares_signal: Callable[[int], int] = lambda seen: seen
        """Is given the signal that some rank has got, 0 for none; returns that of this rank."""
        self._sums: list[OrderedSum] = []
        self._whole: TransformersModel | None = None
        self._plan: StepPlan | None = None
        self._depth = 0
        """Calls of the first rank that this one is in; only the outermost is sent."""
        self._is_spread = False
        """Whether the ranks share the weights, and follow the calls of the first."""

    def _load(self, model_id: str, **options: Any) -> "PreTrainedModel":
        """The model without its weights: `shard` reads each rank's rows. Whole where that cannot be done."""
        names = ("dtype", "attn_implementation", "revision")
        if self.replicated:
            return super()._load(model_id, **options)
        try:
            if self._copies_modules:
                raise NotByRows("lora_modules_to_save copies weights when the adapter is made")
            model, self._files = load_on_meta(model_id, **{name: options[name] for name in names})
            return model
        except NotByRows as reason:
            if self.ranks.rank == 0:
                logger.warning("each rank loads the whole of %s before it keeps its rows, since %s", model_id, reason)
        return super()._load(model_id, **options)

    def spread(self, *, keeps_copy: bool) -> None:
        """Shard the weights, and those of the reference, and read this rank's rows of them. Called by all ranks.

        Args:
            keeps_copy: keep a whole copy on the first rank, for a sampler in that process.
        """
        self._is_spread = True
        if keeps_copy and self.ranks.rank == 0:
            self._whole = super().twin()
            self._whole.ranks = Ranks()
            self._whole.planner.ranks = Ranks()
            assert isinstance(self._whole, RankedModel)
            self._whole._depth = 1  # no call on the copy is sent
            read_weights(self._whole.model, self._files, self.device)
            if self._files:  # nothing of the copy is shared with the model, and it can have the precision of a sampler
                in_precision(self._whole.model, self.dtype)
            self._whole.planner.device = self.device
        if not self._files:
            self.planner.decide()  # each rank for itself, before a forward needs all of them
        if self.replicated:
            return
        frozen = None if self._reference is None else self._reference._copy
        sharded = [self.logp_model] if frozen is None else [self.logp_model, frozen]
        for logp_model in sharded:
            trains = logp_model is self.logp_model
            sums = shard(
                logp_model.model,
                logp_model.base,
                self.ranks,
                self.device,
                compute=self.dtype,
                exact=self.exact and trains,
            )
            self._sums = sums if trains else self._sums
            read_weights(logp_model.model, self._files, self.device)
        if self._reference is not None:
            self._reference.shard(like)
        if self._files:
            self.planner.device, self.logp_model.is_half = self.device, self.dtype.itemsize == 2
            self.logp_model.try_head()
            for logp_model in (*sharded, *([] if self._whole is None else [self._whole.logp_model])):
                logp_model.head = logp_model.head if self.logp_model.head is not None else None
            self.planner.decide()

    def twin(self) -> TransformersModel:
        assert self._whole is not None, "no copy was kept"
        return self._whole

    @property
    def copy_bytes(self) -> int:
        """Bytes of the first rank's copy that are not the model's own; 0 without one."""
        own = set(map(id, self.model.parameters()))
        return sum(p.nbytes for p in self._whole.model.parameters() if id(p) not in own) if self._whole else 0

    def _make_weights(self, model: nn.Module, *halved: Any) -> MasterWeights:
        if self.replicated:
            return ReplicatedWeights(model, self.ranks, *halved, exact=self.exact)
        return ShardedWeights(model, self.ranks, self._sums)

    def add_metric(self, metric: Metric) -> None:
        super().add_metric(metric)
        assert self.ranks.group is not None
        metric.groups = [self.ranks.group]

    # --- calls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _on_all(self, call: str, rollouts: Sequence[Rollout] | None = None, **arguments: Any) -> Iterator[None]:
        """What is done inside is done by all ranks."""
        is_sent = not self._depth and self.ranks.rank == 0
        self._depth += 1
        try:
            if is_sent:
                tensors = None if rollouts is None else packed(rollouts)
                self.ranks.broadcast({"call": call, **arguments}, tensors)
            faulthandler.dump_traceback_later(self.deadline_s + GRACE_S, exit=True)
            yield
        except RuntimeError as error:
            if not is_of_ranks(error):
                raise
            raise self.ranks.lost(f"`{call}` after version {self.version}", error, RESUME) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._depth -= 1

    def follow(self) -> int:
        """Do this rank's part of all calls until the first rank ends the run; its exit code."""
        self._depth = 1
        while True:
            message, tensors = self._receive()
            call = message.pop("call")
            if call == "end":
                return int(message["code"])
            getattr(self, f"_follow_{call}", getattr(self, call))(*([unpacked(tensors)] if tensors else ()), **message)

    def _receive(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            return self.ranks.receive()
        except RuntimeError as error:
            raise self.ranks.lost("a message of the first rank", error, RESUME) from error

    def forward_only(self, inputs: Sequences, *, temperature: float | None = None) -> dict[str, list[Tensor]]:
        rollouts = as_rollouts(inputs)
        with self._on_all("forward_only", rollouts, temperature=temperature):
            return super().forward_only(rollouts, temperature=temperature)

    def reference_logps(self, inputs: Sequences) -> list[Tensor]:
        rollouts = as_rollouts(inputs)
        with self._on_all("reference_logps", rollouts):
            return super().reference_logps(rollouts)

    def next_logits(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        with self._on_all("next_logits", rows=list(rows)):
            return super().next_logits(rows)

    def plan(self, rollouts: Sequence[Rollout], totals: Totals | None = None) -> StepPlan:
        if totals is not None:
            raise InputError("totals of a part of a step are for one process; hand the whole step to one call")
        with self._on_all("plan", rollouts, version=self.version, measures_gap=self.measures_gap):
            return super().plan(rollouts)

    def _follow_plan(self, rollouts: list[Rollout], version: int, measures_gap: bool) -> None:
        self.version, self.measures_gap = version, measures_gap
        self._plan = super().plan(rollouts)

    def run(self, plan: StepPlan, watch: Watch | None = None, record: Record | None = None) -> LossOutput:
        seen: list[tuple[tuple[int, ...], Sequence[int], dict[str, Tensor]]] = []
        with self._on_all("run", records=record is not None):
            if self.ranks.rank:
                faults.reach("follow", self.version)
            output = super().run(plan, watch, None if record is None else lambda *columns: seen.append(columns))
            if record is not None:
                for columns in self._all_columns(seen):
                    record(*columns)
            return output

    def _follow_run(self, records: bool) -> None:
        assert self._plan is not None
        self.run(self._plan, record=(lambda *_: None) if records else None)

    def _all_columns(self, seen: list[Any]) -> Iterator[tuple[tuple[int, ...], Sequence[int], dict[str, Tensor]]]:
        """What all ranks have seen of their micro-batches."""
        parts = [(i, lengths, columns) for i, lengths, columns in seen if i]
        facts = [{"indices": i, "lengths": list(lengths), "names": list(columns)} for i, lengths, columns in parts]
        tensors = {f"{n}.{name}": x for n, (_, _, columns) in enumerate(parts) for name, x in columns.items()}
        for message, found in self.ranks.gather({"parts": facts}, tensors):
            for n, part in enumerate(message["parts"]):
                columns = {name: found[f"{n}.{name}"] for name in part["names"]}
                yield tuple(part["indices"]), part["lengths"], columns

    def clip_grad_and_step(self, max_grad_norm: float | None = 1.0) -> StepReport:
        with self._on_all("clip_grad_and_step", max_grad_norm=max_grad_norm):
            assert isinstance(self.weights, RankWeights)
            self.weights.put_gradients()
            report = super().clip_grad_and_step(max_grad_norm)
            # A signal that any rank got is known to all once per update.
            self.shares_signal(self.ranks.highest(self.shares_signal(0)))
            return report

    def calculate_metric(self) -> dict[str, Any]:
        with self._on_all("calculate_metric"):
            return super().calculate_metric()

    def set_loss(self, loss: PolicyLoss) -> None:
        if not self._is_spread:
            super().set_loss(loss)
            return
        with self._on_all("set_entropy_coef", value=loss.entropy_coef):
            self.loss = loss

    def set_entropy_coef(self, value: float) -> None:
        """Follow the first rank's coefficient of the entropy bonus."""
        self.loss = self.loss.replace(entropy_coef=value)

    # --- weights ----------------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, Tensor]:
        if self.replicated:
            return super().trained()
        with self._on_all("trained"):
            return {n: whole(p.detach()) for n, p in self.model.named_parameters() if p.requires_grad}

    def write_weights(self, folder: Path) -> None:
        """As in one process; each rank writes its rows, and no rank gathers the model. An adapter is gathered."""
        if self.replicated:
            super().write_weights(folder)
            return
        with self._on_all("write_weights", folder=str(folder)):
            if self.lora is not None:
                adapter = {name: tensor.cpu() for name, tensor in self.trained().items()}
                if self.ranks.rank == 0:
                    self.model.save_pretrained(folder, safe_serialization=True, state_dict=adapter)  # type: ignore[operator]
            elif self._files:
                write_whole(self.model, Path(folder), self.dtype)
                if self.ranks.rank == 0:
                    self.model.config.save_pretrained(folder)  # type: ignore[operator,union-attr]
                    if getattr(self.model, "generation_config", None) is not None:
                        write_generation_config(self.model.generation_config, Path(folder))
            else:  # a model whose files have other names than its weights; every rank has had all of it before
                weights = {}
                for name, tensor in self.model.state_dict().items():
                    full = whole(tensor.detach())
                    if self.ranks.rank == 0:
                        weights[name] = (full.to(self.dtype) if full.is_floating_point() else full).cpu()
                if self.ranks.rank == 0:
                    write_model(self.model, Path(folder), state_dict=weights)
            self.ranks.highest(0)  # all files are there

    def save_state(self, folder: Path) -> Entries:
        if self.replicated:
            return super().save_state(folder)
        with self._on_all("save_state", folder=str(folder)):
            return save_shards(self.weights, self.optimizer, Path(folder), self.ranks)

    def load_state(self, folder: Path) -> None:
        with self._on_all("load_state", folder=str(folder)):
            refused = None
            try:
                if self.replicated:
                    super().load_state(Path(folder))
                else:
                    load_shards(self.weights, self.optimizer, Path(folder))
            except CheckpointError as error:
                refused = error
            if self.ranks.highest(int(refused is not None)):
                raise refused or CheckpointError(f"another rank cannot read {folder}; its own log has the reason")

    def _follow_load_state(self, folder: str) -> None:
        try:
            self.load_state(Path(folder))
        except CheckpointError as error:  # the first rank goes to the one before, or ends the run
            logger.warning("rank %d: %s", self.ranks.rank, error)

    def _follow_save_state(self, folder: str) -> None:
        with suppress(NumericError, CheckpointError, OSError):  # raised on all ranks; the first reports it
            self.save_state(Path(folder))

    def _follow_write_weights(self, folder: str) -> None:
        with suppress(OSError):
            self.write_weights(Path(folder))


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
