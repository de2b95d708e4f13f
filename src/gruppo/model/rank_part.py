"""Parts of a model on several ranks: a ShardedModel has its rows of each weight, a ReplicatedModel all of them.

All ranks make the same calls, each with the whole step. `RankedModel` makes them on all ranks.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gruppo.metric import Metric
from gruppo.model.checkpoint import write_generation_config, write_model
from gruppo.model.optim import MasterWeights
from gruppo.model.precision import half_or_float, in_precision
from gruppo.model.sharding import OrderedSum, ReplicatedWeights, ShardedWeights, like, shard, whole
from gruppo.model.shards import load_shards, read_weights, save_shards, write_whole
from gruppo.model.transformers_model import TransformersModel
from gruppo.parallel.ranks import Ranks
from gruppo.weights.files import Entries
from gruppo.weights.meta_load import NotByRows, load_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class RankPart(TransformersModel):
    """A rank's part of the actor.

    Args:
        ranks: the processes, of which this is one.
        exact: give the bits of one process.
        options: those of `TransformersModel`.
    """

    def __init__(self, model_id: Any, *, ranks: Ranks, exact: bool, dtype: Any = "auto", **options: Any) -> None:
        self.ranks, self.exact = ranks, exact
        self._copy: TransformersModel | None = None
        compute = half_or_float(dtype)
        loaded: Any = str(compute).removeprefix("torch.") if self.num_shards == 1 else "float32"
        super().__init__(model_id, process_group=ranks.group, dtype=loaded, **options)
        self.dtype = compute
        self.ranks = self.planner.ranks = ranks

    def spread(self, *, keeps_copy: bool) -> None:
        """Begin to share the steps. Called by all ranks once the reference is frozen, before there is an optimizer.

        Args:
            keeps_copy: keep a whole copy on the first rank, for a sampler in that process.
        """
        if keeps_copy and self.ranks.rank == 0:
            self._copy = super().twin()
            self._copy.ranks = self._copy.planner.ranks = Ranks()

    def twin(self) -> TransformersModel:
        assert self._copy is not None, "no copy was kept"
        return self._copy

    @property
    def copy_bytes(self) -> int:
        own = set(map(id, self.model.parameters()))
        return sum(p.nbytes for p in self._copy.model.parameters() if id(p) not in own) if self._copy else 0

    def add_metric(self, metric: Metric) -> None:
        super().add_metric(metric)
        assert self.ranks.group is not None
        metric.groups = [self.ranks.group]


class ReplicatedModel(RankPart):
    """All weights on every rank; gradients alone are added up over ranks."""

    def spread(self, *, keeps_copy: bool) -> None:
        super().spread(keeps_copy=keeps_copy)
        self.planner.decide()

    def _make_weights(self, model: nn.Module, *halved: Any) -> MasterWeights:
        return ReplicatedWeights(model, self.ranks, *halved, exact=self.exact)


class ShardedModel(RankPart):
    """This rank's rows of each weight, in float32; FSDP gathers them in the precision in which the model computes."""

    def __init__(self, model_id: Any, *, ranks: Ranks, **options: Any) -> None:
        self.num_shards = ranks.world
        self._files: dict[str, Path] = {}
        """Of the weights, as long as they are not read; none where each rank has read all of them."""
        self._sums: list[OrderedSum] = []
        lora = options.get("lora")
        self._copies_modules = lora is not None and bool(lora.modules_to_save)
        super().__init__(model_id, ranks=ranks, **options)

    def _load(self, model_id: str, **options: Any) -> "PreTrainedModel":
        """The model without its weights: `spread` reads each rank's rows. Whole where that cannot be done."""
        names = ("dtype", "attn_implementation", "revision")
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
        """Shard the weights, and those of the reference, and read this rank's rows of them."""
        super().spread(keeps_copy=keeps_copy)
        if self._copy is not None:
            read_weights(self._copy.model, self._files, self.device)
            if self._files:  # nothing of the copy is shared with the model, and it can have the precision of a sampler
                in_precision(self._copy.model, self.dtype)
            self._copy.planner.device = self.device
        if not self._files:
            self.planner.decide()  # each rank for itself, before a forward needs all of them
        policy, frozen = self.logp_model, None if self._reference is None else self._reference.frozen
        sharded = [policy] if frozen is None else [policy, frozen]
        for each in sharded:
            exact = self.exact and each is policy
            sums = shard(each.model, each.base, self.ranks, self.device, compute=self.dtype, exact=exact)
            self._sums = sums if each is policy else self._sums
            read_weights(each.model, self._files, self.device)
        if self._reference is not None:
            self._reference.shard(like)
        if self._files:
            self.planner.device, policy.is_half = self.device, self.dtype.itemsize == 2
            policy.try_head()
            for each in (*sharded, *([] if self._copy is None else [self._copy.logp_model])):
                each.head = each.head if policy.head is not None else None
            self.planner.decide()

    def _make_weights(self, model: nn.Module, *halved: Any) -> MasterWeights:
        return ShardedWeights(model, self.ranks, self._sums)

    def trained(self) -> dict[str, Tensor]:
        return {n: whole(p.detach()) for n, p in self.model.named_parameters() if p.requires_grad}

    def write_weights(self, folder: Path) -> None:
        """As in one process; each rank writes its rows, and no rank gathers the model. An adapter is gathered."""
        is_first = self.ranks.rank == 0
        if self.lora is not None:
            adapter = {name: tensor.cpu() for name, tensor in self.trained().items()}
            if is_first:
                self.model.save_pretrained(folder, safe_serialization=True, state_dict=adapter)  # type: ignore[operator]
        elif self._files:
            write_whole(self.model, folder, self.dtype)
            if is_first:
                self.model.config.save_pretrained(folder)  # type: ignore[operator,union-attr]
                if getattr(self.model, "generation_config", None) is not None:
                    write_generation_config(self.model.generation_config, folder)
        else:  # a model whose files have other names than its weights; every rank has had all of it before
            weights = {}
            for name, tensor in self.model.state_dict().items():
                full = whole(tensor.detach())
                if is_first:
                    weights[name] = (full.to(self.dtype) if full.is_floating_point() else full).cpu()
            if is_first:
                write_model(self.model, folder, state_dict=weights)
        self.ranks.highest(0)  # all files are there

    def save_state(self, folder: Path) -> Entries:
        return save_shards(self.weights, self.optimizer, folder, self.ranks)

    def load_state(self, folder: Path) -> None:
        load_shards(self.weights, self.optimizer, folder)
