"""TransformersModel: a causal language model of transformers that scores tokens, takes gradients and steps."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from gruppo.batch import PackedBatch, Totals, pack
from gruppo.batch.packed import PerSequence, as_rollouts, with_given
from gruppo.errors import InputError
from gruppo.loss import GRPOLoss, LossOutput, PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.metric import Metric, MismatchMetric
from gruppo.model.checkpoint import (
    load_pretrained,
    load_training_state,
    save_pretrained,
    save_training_state,
    write_model,
)
from gruppo.model.logp_model import HeadChoice, LogpModel
from gruppo.model.lora import LoraSpec, add_lora, lora_of
from gruppo.model.offload import HostInputs
from gruppo.model.optim import MasterWeights, Schedule, StepReport, clip_and_step, make_optimizer, schedule_factor
from gruppo.model.plan import Layout, Planner, StepPlan
from gruppo.model.precision import DTYPES, frozen_first, in_precision, switch_off_dropout
from gruppo.model.reference import Reference, frozen_copy
from gruppo.parallel.ranks import Ranks
from gruppo.types import InputFeature, Rollout
from gruppo.weights import source
from gruppo.weights.files import Entries

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from gruppo.model.decoder import Decoded

logger = logging.getLogger(__name__)

Sequences = Sequence[Rollout | InputFeature]
Watch = Callable[[PackedBatch, LossInputs], None]
"""Is given a micro-batch and what its loss was computed on."""
Record = Callable[[tuple[int, ...], Sequence[int], dict[str, Tensor]], None]
"""Is given the sequences of a micro-batch, how many scored tokens each has, and columns of numbers per token."""
MEAN = "mean/"
"""Before the names of terms whose means over tokens are added up beside the terms themselves."""
KEEP = 0.9
"""Share of activations that is kept: all that come from a product, and not what is computed from them in one pass."""


class TransformersModel:
    """The actor.

    Works as it is: without `set_loss` it uses GRPO, without `set_optimizer` AdamW.

    Args:
        model_id: a folder, `hf://org/name`, `ms://org/name`, a hub id, `builtin`, `builtin-chat`, or a model
            object.
        lora: train this adapter instead of the weights. A model that has an adapter goes on with it.
        dtype: in which the model computes: "float32", "bfloat16", or "auto": bfloat16 on a GPU that has it, else as the
            model object is, else float32. Beside bfloat16 weights and adapters, training keeps float32 masters, sums of
            gradients and optimizer state; log-probs, ratios and reductions are float32 in any case.
        quantize: "nf4" loads the linear layers of the base in 4 bits, for an adapter to train on (QLoRA). None: as they
            are, or for an adapter's folder as they were while the adapter trained.
        device: default: a GPU if there is one.
        tokens_per_microbatch: tokens of one forward; for memory only, no result depends on it. None: all at once.
        temperature: at which tokens were sampled and are scored.
        gradient_checkpointing: keep the inputs of blocks only and recompute the rest in the backward: least memory.
        offload: keep those inputs in pinned host memory.
        keep_activations: share of its activations that a compiled block keeps for the backward; what is cheapest to
            compute again is not kept. None: 0.9.
        compile: compile the decoder blocks for scoring and training; None: on a GPU.
        layout: "padded" rows (any model), "packed" into one row (attention that takes boundaries from positions),
            "shared" prompts (each computed once per group), or "auto": shared where that is worth it, else padded. A
            model that scores otherwise in the layout than in padded rows runs padded, with a warning that says so.
        head: "walk" over windows of tokens without holding all logits, "dense" for all at once, or "auto" by size.
        attn_implementation, revision: handed to transformers.
        trains: False for a model that samples or scores alone: its weights need no float32 masters.
        process_group: ranks that share each step. All of them call the same methods with the whole step; its
            micro-batches are dealt out.
    """

    num_shards = 1
    """Parts that the weights are in, one on each rank."""
    copy_bytes = 0
    """Bytes of a copy for a sampler that are not the model's own."""

    def __init__(
        self,
        model_id: "str | PreTrainedModel",
        *,
        lora: LoraSpec | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        quantize: Literal["nf4"] | None = None,
        device: str | torch.device | None = None,
        tokens_per_microbatch: int | None = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        offload: bool = False,
        keep_activations: float | None = None,
        compile: bool | None = None,
        layout: Layout = "auto",
        head: HeadChoice = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        trains: bool = True,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        compiles = self.device.type == "cuda" if compile is None else compile
        _check_options(dtype, layout, self.device, gradient_checkpointing, offload, keep_activations, compiles)
        has_bf16 = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        # Weights that are sharded over ranks get their precision from what shards them.
        is_auto = dtype == "auto" and has_bf16 and process_group is None
        compute = torch.bfloat16 if is_auto else DTYPES.get(dtype)
        # Masters are what the files hold: rounded, they would lie amid the steps of bfloat16, where a small update
        # changes no weight that the model computes with.
        has_masters = trains and lora is None and quantize is None
        has_masters = has_masters and not (isinstance(model_id, str) and source.holds_adapter(model_id))
        loaded = torch.float32 if compute is None or has_masters else compute
        self.quantized = {} if quantize is None else {"quantize": quantize, "dtype": str(loaded).removeprefix("torch.")}
        """How the base was quantised here, and from which dtype: a folder with its adapter notes it. {}: not at all."""
        self._base: dict[str, str] = {}
        """Digest of the base of an adapter."""
        self.tokenizer = tokenizer
        if isinstance(model_id, str):
            _check_quantize(model_id, quantize, lora, process_group)
            options = {"dtype": loaded, "attn_implementation": attn_implementation, "revision": revision}
            model = self._open(model_id, lora, options | {"quantize": quantize, "device": self.device})
        elif quantize is not None:
            raise InputError(
                f"quantize={quantize!r} is for a model that is loaded by its name; load the object in 4 bits: "
                "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))"
            )
        else:
            model = model_id
        if getattr(model, "is_quantized", False) and lora is None and lora_of(model) is None:
            raise InputError(
                "the weights of the model are quantised, and such weights do not train; give lora=LoraSpec()"
            )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]  # transformers'
        if lora is not None:
            model = add_lora(model, lora)  # type: ignore[arg-type]
        if gradient_checkpointing or compiles:
            # Recomputation passes no gradient through inputs without one; compiled, the first block would be a graph
            # of its own.
            embedding = model.get_input_embeddings()  # type: ignore[operator]  # transformers'
            embedding.register_forward_hook(lambda _m, _i, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
        switch_off_dropout(model)
        if any(parameter.is_meta for parameter in model.parameters()):
            model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        else:
            nn.Module.to(model, self.device)
        self.dtype = compute or frozen_first(model).dtype
        """In which the model computes."""
        self._weights = in_precision(model, self.dtype, self._make_weights)
        self.model = model.train(gradient_checkpointing)  # transformers checkpoints in train mode only
        self.lora = lora or lora_of(model)
        """The adapter that trains; None: all weights."""
        self.version = 0
        """How many optimizer steps the weights have seen."""
        self.ranks = Ranks(process_group)
        self.logp_model = LogpModel(self.model, temperature=temperature, head=head)
        if compiles:
            from gruppo.model.compiled_blocks import CompiledBlocks  # brings the compiler

            self.logp_model.compiled = CompiledBlocks(self.logp_model.base, keep=keep_activations or KEEP)
        self._host = HostInputs(self.device) if offload else None
        self.planner = Planner(
            self.logp_model, layout=layout, tokens_per_microbatch=tokens_per_microbatch, ranks=self.ranks
        )
        self.loss: PolicyLoss = GRPOLoss()
        self.metrics: list[Metric] = []
        self.mismatch = MismatchMetric(process_group=process_group)
        self.measures_gap = True
        """Whether to measure how far the sampler's log-probs are from the trainer's, where rollouts have them."""
        self._reference: Reference | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._base_lr = 0.0
        self._schedule: tuple[Schedule, int, int | None] = ("constant", 0, None)

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _open(self, model_id: str, lora: LoraSpec | None, options: dict[str, Any]) -> nn.Module:
        """The model of a name, with its tokenizer and the digest of what an adapter stands on."""
        revision = options["revision"]
        self.quantized = source.quantization_of(model_id) or self.quantized
        model = self._load(model_id, **options)
        if lora is not None or source.holds_adapter(model_id):
            pinned = model_id if revision is None else f"{model_id}@{revision}"
            digest = source.weights_digest(source.base_of(pinned))
            self._base = {} if digest is None else {"base": digest}  # now: the files may change while it trains
        self.tokenizer = self.tokenizer or source.load_tokenizer(model_id, revision)
        return model

    def _load(self, model_id: str, **options: Any) -> "PreTrainedModel":
        """The model of a name."""
        return source.load_model(model_id, **options)

    def set_loss(self, loss: PolicyLoss) -> None:
        """Train with this loss. One that needs a reference freezes it now: the weights as they are."""
        if not isinstance(loss, PolicyLoss):
            raise InputError(f"set_loss takes a loss of gruppo.loss, such as GRPOLoss(), got {loss!r}")
        self.loss = loss
        if "ref_logps" in loss.needs:
            self.reference()

    def set_optimizer(self, optimizer: str | torch.optim.Optimizer = "AdamW", **options: Any) -> None:
        """An optimizer of torch.optim by name with its options (`lr=1e-6`), or one made over `model.parameters()`."""
        if isinstance(optimizer, str):
            options = {"lr": 1e-5 if self.lora else 1e-6, "weight_decay": 0.0} | options
            optimizer = make_optimizer(optimizer, self.weights.parameters, **options)
        elif options:
            raise InputError(f"options {sorted(options)} go with an optimizer's name, not with an optimizer")
        elif any(p.element_size() < 4 for group in optimizer.param_groups for p in group["params"]):
            raise InputError(
                "the optimizer was made over half-precision weights, in which small steps are rounded away; name it "
                'instead, set_optimizer("AdamW", lr=...), make it over model.weights.parameters, or use dtype="float32"'
            )
        self._optimizer = optimizer
        self._base_lr = optimizer.param_groups[0]["lr"]

    def set_lr_scheduler(
        self, schedule: Schedule = "constant", *, warmup_steps: int = 0, total_steps: int | None = None
    ) -> None:
        """Linear warm-up, then constant, linear to 0 or cosine to 0 over `total_steps`."""
        if schedule not in ("constant", "linear", "cosine"):
            raise InputError(f"schedule must be 'constant', 'linear' or 'cosine', got {schedule!r}")
        if schedule != "constant" and total_steps is None:
            raise InputError(f"schedule {schedule!r} needs total_steps")
        self._schedule = (schedule, warmup_steps, total_steps)

    def add_metric(self, metric: Metric) -> None:
        """Accumulate this metric over every forward_backward: over its sequences with an advantage other than 0."""
        if not isinstance(metric, Metric):
            raise InputError(f"add_metric takes a gruppo.metric.Metric, such as GRPOMetric(), got {metric!r}")
        self.metrics.append(metric)

    @property
    def weights(self) -> MasterWeights:
        """What training changes, in float32; made when it is first needed."""
        if self._weights is None:
            self._weights = self._make_weights(self.model)
        return self._weights

    def _make_weights(self, model: nn.Module, *halved: Any) -> MasterWeights:
        """Those of a model, some of them `halved`; of another kind on several ranks."""
        return MasterWeights(model, *halved)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self.set_optimizer()
        assert self._optimizer is not None
        return self._optimizer

    def reference(self) -> Reference:
        """The reference policy; frozen at the first call."""
        if self._reference is None:
            if self.version and self.lora is None:
                logger.warning("the reference policy is frozen after %d steps, not at the start", self.version)
            self._reference = Reference(self.logp_model)
        return self._reference

    def twin(self) -> "TransformersModel":
        """A copy that scores: with weights of its own where this model trains, the others shared."""
        twin, plan = copy.copy(self), self.planner
        twin.logp_model = frozen_copy(
            self.logp_model, shared=[p for p in self.model.parameters() if not p.requires_grad]
        )
        twin.model = twin.logp_model.model
        # torch folds a product by whether its factors train; the copy is to score to the bit as the model does.
        for own, parameter in zip(twin.model.parameters(), self.model.parameters(), strict=True):
            own.requires_grad_(parameter.requires_grad)
        twin.planner = Planner(
            twin.logp_model, layout=plan.layout, tokens_per_microbatch=plan.tokens_per_microbatch, ranks=self.ranks
        )
        twin._weights = twin._optimizer = twin._reference = None
        return twin

    # --- scoring --------------------------------------------------------------------------------------------------

    def forward_only(self, inputs: Sequences, *, temperature: float | None = None) -> dict[str, list[Tensor]]:
        """Log-probs and entropies without gradients: per sequence one value per scored token.

        Args:
            temperature: at which to score; None: the model's own.
        """
        return self._score(self.logp_model if temperature is None else self.logp_model.at(temperature), inputs)

    def reference_logps(self, inputs: Sequences) -> list[Tensor]:
        """Log-probs under the reference policy, per sequence one value per scored token."""
        with self.reference().logp_model() as logp_model:
            return self._score(logp_model, inputs)["logps"]

    @torch.no_grad()
    def next_logits(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Logits of the token after each row of tokens at temperature 1, `[N, V]` float32, as they are scored."""
        # Token 0 marks the one slot whose logits are wanted; that slot does not see it.
        rollouts = as_rollouts([InputFeature(prompt_ids=tuple(row), completion_ids=(0,)) for row in rows])
        logits_NV = torch.zeros(len(rows), 0, dtype=torch.float32, device=self.device)
        for batch in self.planner.split(rollouts):
            found = self.logp_model.logits(batch.to(self.device)).float()
            logits_NV = logits_NV if logits_NV.shape[1] else found.new_zeros(len(rows), found.shape[1])
            logits_NV[list(batch.indices)] = found[: len(batch.indices)]  # none, if idle
        return self.ranks.sum(logits_NV)

    def decode(
        self,
        prompts: Sequence[tuple[int, ...]],
        prompt_of: Sequence[int],
        uniforms: Tensor,
        *,
        places: int,
        temperature: float,
        stop_ids: Sequence[int],
        poll: Callable[[], None],
    ) -> "Decoded":
        """Completions drawn on the GPU, see `GraphDecoder`."""
        from gruppo.model.decoder import decode

        options: dict[str, Any] = {"places": places, "temperature": temperature, "stop_ids": stop_ids}
        return decode(self.logp_model, prompts, prompt_of, uniforms, poll=poll, **options)

    def rows_at_once(self, max_new_tokens: int) -> int:
        """Rows that `decode` has places for; 0: it cannot run this model."""
        if self.device.type != "cuda":
            return 0
        from gruppo.model.decoder import can_decode, rows_that_fit

        return rows_that_fit(self.logp_model, max_new_tokens) if can_decode(self.logp_model) else 0

    @torch.no_grad()
    def _score(self, logp_model: LogpModel, inputs: Sequences) -> dict[str, list[Tensor]]:
        rollouts = as_rollouts(inputs)
        lengths = [rollout.num_scored for rollout in rollouts]
        empty = torch.zeros(0, dtype=torch.float32, device=self.device)
        results: dict[str, list[Tensor]] = {name: [empty] * len(rollouts) for name in ("logps", "entropies")}
        for batch in self.planner.split(rollouts):
            scored = logp_model(batch.to(self.device))
            for values, numbers in zip(results.values(), scored, strict=True):
                for i, piece in zip(batch.indices, numbers.split(batch.lengths), strict=False):  # not if idle
                    values[i] = piece
        if self.ranks.world > 1:
            for name, values in results.items():  # each rank has its own share, and 0 elsewhere
                own = [v if len(v) else v.new_zeros(n) for v, n in zip(values, lengths, strict=True)]
                results[name] = list(self.ranks.sum(torch.cat([*own, empty])).split(lengths))
        return results

    # --- training -------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        inputs: Sequences,
        *,
        advantages: PerSequence | None = None,
        old_logps: PerSequence | None = None,
        ref_logps: PerSequence | None = None,
        sampler_logps: PerSequence | None = None,
        totals: Totals | None = None,
    ) -> LossOutput:
        """Add the gradient of the loss over `inputs`; micro-batches are never visible in the result.

        Sequences of advantage 0 count in the totals and are otherwise left out when their gradient is exactly 0, that
        is without a KL penalty or entropy bonus: nothing of them is computed. Metrics never count them, whether they
        were computed or not; the gap between sampler and trainer is measured on all sequences.

        Args:
            inputs: rollouts, which carry what they are trained with; or features, with the rest as keywords.
            advantages: one per sequence, or one list per sequence with one value per scored token.
            old_logps: per sequence its log-probs at sampling time. None: those of the inputs, if they have any; else
                on-policy.
            ref_logps: None: those of the inputs, else computed here if the loss needs them.
            sampler_logps: the sampler's own log-probs: for a correction, and for the reported gap.
            totals: the totals of the whole step, when this call is not all of it.

        A loss that looks at the whole step (`loss.surveys`) scores all sequences once more before the first backward.
        """
        given = {"advantage": advantages, "old_logps": old_logps, "ref_logps": ref_logps, "logps": sampler_logps}
        return self.run(self.plan(with_given(inputs, given), totals))

    def plan(self, rollouts: Sequence[Rollout], totals: Totals | None = None) -> StepPlan:
        """What a step over these rollouts will compute. Arguments as for `forward_backward`."""
        is_whole_step = totals is None
        totals = Totals.of_step(rollouts, self.version) if totals is None else totals
        if self.loss.surveys and (totals.survey is None or self.loss.draws_tokens):
            if not is_whole_step:
                raise InputError(
                    f"{type(self.loss).__name__} looks at all tokens of a step: hand the whole step to one call"
                    + ("" if self.loss.draws_tokens else ", or give totals made by loss.survey(...) over all of it")
                )
            totals = self._survey(rollouts, totals)
        return self.planner.step(rollouts, self.loss, totals, measures_gap=self.measures_gap)

    def run(self, plan: StepPlan, watch: Watch | None = None, record: Record | None = None) -> LossOutput:
        """Forward, loss and backward of each micro-batch of a plan.

        Args:
            watch: called with each micro-batch of this process.
            record: called with the numbers of each token of the step: log-probs, entropies, what the loss clipped or
                left out.
        """
        rows: list[dict[str, Tensor]] = []
        for batch in plan.microbatches:
            batch = batch.to(self.device)
            if "ref_logps" in self.loss.needs and batch.ref_logps is None:
                batch = replace(batch, ref_logps=self._reference_logps(batch))
            with nullcontext() if self._host is None else self._host.moved():
                output, inputs = self.logp_model.loss_of(batch, self.loss, plan.totals)
            output.loss.backward()
            self.weights.collect_gradients()
            is_off_policy = bool(batch.indices) and not output.on_policy
            row = {"loss": output.loss.detach(), "off_policy": torch.tensor(is_off_policy), **output.terms}
            row |= {MEAN + name: value for name, value in output.means.items()}
            rows.append(row if output.rejected is None else row | {"rejected": output.rejected})
            self._observe(inputs)
            if watch is not None:
                watch(batch, inputs)
            if record is not None:
                columns = {"policy_logps": inputs.logps.detach(), "rejected": self.loss.rejected_tokens(inputs)}
                columns |= {"old_logps": inputs.old_logps, "ref_logps": inputs.ref_logps}
                columns |= {"entropies": inputs.entropies, "clipped": self.loss.clipped_tokens(inputs)}
                record(batch.indices, batch.lengths, {k: v.detach() for k, v in columns.items() if v is not None})
        for batch in plan.observed:
            self._measure_gap(batch.to(self.device), plan)
        sums: dict[str, Any] = {"loss": torch.zeros((), dtype=torch.float32, device=self.device), "off_policy": 0}
        for row in self.ranks.in_order(rows):
            for name, value in row.items():
                sums[name] = sums.get(name, 0) + value
        means = {name.removeprefix(MEAN): sums.pop(name) for name in list(sums) if name.startswith(MEAN)}
        given = {"loss": sums.pop("loss"), "rejected": sums.pop("rejected", None), "means": means}
        return LossOutput(**given, on_policy=not sums.pop("off_policy"), terms=sums)

    def clip_grad_and_step(self, max_grad_norm: float | None = 1.0) -> StepReport:
        """Clip the gradient, step, move the schedule on. A non-finite gradient changes nothing and is reported."""
        schedule, warmup_steps, total_steps = self._schedule
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self._base_lr * schedule_factor(schedule, self.version, warmup_steps, total_steps)
        self.weights.put_gradients()
        report = clip_and_step(self.weights, optimizer, max_grad_norm=max_grad_norm)
        if report.skipped:
            logger.warning("step skipped: the gradient of %s is not finite", report.culprit)
        else:
            self.version += 1
        return report

    def calculate_metric(self) -> dict[str, Any]:
        """Everything the metrics have gathered since the last call."""
        results: dict[str, Any] = {}
        for metric in self.metrics:
            results |= metric.calculate()
            metric.reset()
        results |= self.mismatch.calculate()
        self.mismatch.reset()
        return results

    # --- weights and files ----------------------------------------------------------------------------------------

    def trained(self) -> dict[str, Tensor]:
        """A copy of the weights that train, by name, in the precision in which the model computes."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def save_state(self, folder: Path) -> Entries:
        """Write weights and optimizer into a folder of a checkpoint; entries of its manifest that are known by then."""
        save_training_state(self.weights, self.optimizer, folder)
        return {}

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, in one process or on any number of ranks."""
        from gruppo.model.shards import is_sharded, load_shards  # brings torch.distributed.checkpoint

        (load_shards if is_sharded(folder) else load_training_state)(self.weights, self.optimizer, folder)

    def save(self, folder: str | Path, *, write: Callable[[Path], None] | None = None) -> None:
        """Write the model as transformers, PEFT and vLLM load it; with LoRA the adapter, in float32.

        Args:
            write: what writes the weights; None: `write_weights`.
        """
        with self.weights.in_full() if self.lora else nullcontext():
            save_pretrained(write or self.write_weights, self.tokenizer, Path(folder), {**self.quantized, **self._base})

    def write_weights(self, folder: Path) -> None:
        """Write all weights, or with LoRA the adapter, under the names that transformers and PEFT give them."""
        write_model(self.model, folder)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote into this model."""
        with nullcontext() if self._weights is None else self._weights.in_full():
            load_pretrained(self.model, Path(folder), base=self._base.get("base"))

    # --- inside ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reference_logps(self, batch: PackedBatch) -> Tensor:
        with self.reference().logp_model() as logp_model:
            logps_N = logp_model(batch)[0].to(batch.advantages.dtype)
        return torch.zeros_like(batch.advantages).index_copy(0, batch.scored, logps_N)

    def _survey(self, rollouts: Sequence[Rollout], totals: Totals) -> Totals:
        """The totals of a step with what its loss must know of all its tokens."""
        batch = pack(rollouts).to(self.device)
        logps = torch.zeros(len(batch.scored), dtype=torch.float32, device=self.device)
        entropies = None
        if self.loss.surveys_policy and rollouts:
            scored = self.forward_only(rollouts)
            logps, entropies = (torch.cat(scored[name]) for name in ("logps", "entropies"))
        if self.loss.draws_tokens:
            batch = replace(batch, sequence_ids=torch.arange(len(rollouts), device=self.device))
        return self.loss.surveyed(LossInputs.of(batch, logps, entropies, totals)).totals

    @torch.no_grad()
    def _observe(self, inputs: LossInputs) -> None:
        if self.measures_gap and inputs.sampler_logps is not None:
            self.mismatch.add(inputs)
        for metric in self.metrics:
            # On-policy the loss took the policy's own log-probs: ratio 1, which a metric should show and not omit.
            metric.add(replace(inputs, on_policy=False))

    @torch.no_grad()
    def _measure_gap(self, batch: PackedBatch, plan: StepPlan) -> None:
        """Count sequences that are not trained on in the gap between sampler and trainer: they are part of it too."""
        if not plan.scores_observed:
            logps_N = None if batch.old_logps is None else batch.old_logps[batch.scored]
        else:
            logps_N = self.logp_model(batch)[0]
        if len(batch.scored) and logps_N is not None:
            self.mismatch.add(LossInputs.of(batch, logps_N, None, plan.totals))


def _check_options(
    dtype: str,
    layout: str,
    device: torch.device,
    gradient_checkpointing: bool,
    offload: bool,
    keep_activations: float | None,
    compiles: bool,
) -> None:
    if dtype not in ("auto", *DTYPES):
        raise InputError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if layout not in get_args(Layout):
        raise InputError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    if offload and not (gradient_checkpointing and device.type == "cuda"):
        raise InputError(
            "offload=True moves what gradient_checkpointing=True keeps on a GPU to the host, and here there is "
            + (f"no GPU, device={device}" if gradient_checkpointing else "gradient_checkpointing=False")
        )
    if keep_activations is not None and not (0 < keep_activations <= 1 and compiles):
        raise InputError(
            f"keep_activations must be above 0 and at most 1, and needs compiled blocks (compile=True), got "
            f"{keep_activations!r} with compile={compiles}; gradient_checkpointing=True recomputes without them"
        )


def _check_quantize(model_id: str, quantize: Any, lora: LoraSpec | None, process_group: Any) -> None:
    """Refuse to quantise where nothing could train, or where weights are sharded."""
    if quantize not in (None, "nf4"):
        raise InputError(f"quantize must be 'nf4' or None, got {quantize!r}")
    if quantize is not None and lora is None and not source.holds_adapter(model_id):
        raise InputError(f"quantize={quantize!r} needs an adapter, since 4-bit weights do not train; switch lora on")
    if quantize is not None and process_group is not None:
        raise InputError(f"quantize={quantize!r} is for one process: 4-bit weights cannot be sharded over ranks")
