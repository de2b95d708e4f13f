"""TransformersModel: a causal language model of transformers that scores tokens, takes gradients and steps."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from gruppo.batch import PackedBatch, Totals, pack
from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.loss import GRPOLoss, LossOutput, PolicyLoss
from gruppo.metric import MismatchMetric, PolicyMetric
from gruppo.model import source
from gruppo.model.batches import Batches
from gruppo.model.forward import HeadChoice, Scorer
from gruppo.model.head_step import loss_and_backward
from gruppo.model.layout import Layout
from gruppo.model.lora import LoraSpec, add_lora, lora_of
from gruppo.model.optim import MasterWeights, Schedule, StepReport, clip_and_step, make_optimizer, schedule_factor
from gruppo.model.reference import Reference
from gruppo.model.step_survey import survey_step
from gruppo.types import InputFeature

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PerSequence = Tensor | Sequence[Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersModel:
    """The actor.

    Works as it is: without `set_loss` it uses GRPO, without `set_optimizer` AdamW.

    Args:
        model_id: a folder, `hf://org/name`, `ms://org/name`, a hub id, `builtin`, or a model object.
        lora: train this adapter instead of the weights. A model that has an adapter goes on with it.
        dtype: in which the model computes. Training keeps float32 master weights and float32 optimizer state beside
            bfloat16 weights; log-probs, ratios and reductions are float32 in any case.
        device: default: a GPU if there is one.
        tokens_per_microbatch: tokens of one forward; for memory only, no result depends on it. None: all at once.
        temperature: at which tokens were sampled and are scored.
        gradient_checkpointing: recompute activations in the backward: less memory, more time.
        layout: "padded" rows (any model), "packed" into one row (attention that takes boundaries from positions),
            "shared" prompts (each computed once per group), or "auto": shared where that is worth it, else padded. A
            model that scores otherwise in the layout than in padded rows runs padded, with a warning that says so.
        head: "walk" over windows of tokens without holding all logits, "plain" autograd, or "auto" by size.
        attn_implementation, revision: handed to transformers.
    """

    def __init__(
        self,
        model_id: "str | PreTrainedModel",
        *,
        lora: LoraSpec | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | torch.device | None = None,
        tokens_per_microbatch: int | None = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        layout: Layout = "auto",
        head: HeadChoice = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if layout not in get_args(Layout):
            raise InputError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
        if isinstance(model_id, str):
            model: nn.Module = source.load_model(
                model_id, dtype=DTYPES[dtype], attn_implementation=attn_implementation, revision=revision
            )
            self.tokenizer = tokenizer or source.load_tokenizer(model_id, revision)
        else:
            model, self.tokenizer = model_id, tokenizer
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]  # transformers'
            model.enable_input_require_grads()  # type: ignore[operator]  # so that a frozen embedding passes gradients on
        if lora is not None:
            model = add_lora(model, lora)  # type: ignore[arg-type]
        _switch_off_dropout(model)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        nn.Module.to(model, self.device)
        self.model = model.train(gradient_checkpointing)  # transformers checkpoints in train mode only
        self.lora = lora or lora_of(model)
        """The adapter that trains; None: all weights."""
        self.tokens_per_microbatch = tokens_per_microbatch
        self.version = 0
        """How many optimizer steps the weights have seen."""
        self.scorer = Scorer(self.model, temperature=temperature, head=head)
        self.batches = Batches(self.scorer, layout)
        self.loss: PolicyLoss = GRPOLoss()
        self.metrics: list[PolicyMetric] = []
        self.mismatch = MismatchMetric()
        """How far the sampler's log-probs are from the trainer's, when they are given."""
        self._weights: MasterWeights | None = None
        self._reference: Reference | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._base_lr = 0.0
        self._schedule: tuple[Schedule, int, int | None] = ("constant", 0, None)

    # --- set-up ---------------------------------------------------------------------------------------------------

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

    def add_metric(self, metric: PolicyMetric) -> None:
        """Accumulate this metric over every forward_backward: over its sequences with an advantage other than 0."""
        if not isinstance(metric, PolicyMetric):
            raise InputError(f"add_metric takes a metric of gruppo.metric, such as GRPOMetric(), got {metric!r}")
        self.metrics.append(metric)

    @property
    def weights(self) -> MasterWeights:
        """What training changes, in float32; made when it is first needed."""
        if self._weights is None:
            self._weights = MasterWeights(self.model)
        return self._weights

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
            self._reference = Reference(self.scorer)
        return self._reference

    # --- scoring --------------------------------------------------------------------------------------------------

    def forward_only(
        self, inputs: Sequence[InputFeature], *, temperature: float | None = None
    ) -> dict[str, list[Tensor]]:
        """Log-probs and entropies without gradients: per feature one value per scored token.

        Args:
            temperature: at which to score; None: the model's own.
        """
        return self._score(self.scorer if temperature is None else self.scorer.at(temperature), inputs)

    def reference_logps(self, inputs: Sequence[InputFeature]) -> list[Tensor]:
        """Log-probs under the reference policy, per feature one value per scored token."""
        with self.reference().scorer() as scorer:
            return self._score(scorer, inputs)["logps"]

    def _score(self, scorer: Scorer, inputs: Sequence[InputFeature]) -> dict[str, list[Tensor]]:
        results: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(inputs) for name in ("logps", "entropies")}
        _check_features(inputs)
        with torch.no_grad():
            for part, batch in self.batches.make(inputs, self.tokens_per_microbatch):
                outputs = scorer(batch)
                counts = batch.segments.length.tolist()
                scored_T = batch.labels != IGNORE_INDEX
                for name, values in results.items():
                    for i, piece in zip(part, outputs[name][scored_T].split(counts), strict=True):
                        values[i] = piece
        return results

    # --- training -------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        inputs: Sequence[InputFeature],
        *,
        advantages: PerSequence,
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
            inputs: the sequences.
            advantages: one per sequence, or one list per sequence with one value per scored token.
            old_logps: per sequence its log-probs at sampling time. None: those of the features, if they have any;
                else on-policy.
            ref_logps: None: those of the features, else computed here if the loss needs them.
            sampler_logps: the sampler's own log-probs: for a correction, and for the reported gap.
            totals: the totals of the whole step, when this call is not all of it.

        A loss that looks at the whole step (`loss.surveys`) scores all sequences once more before the first backward.
        """
        _check_features(inputs)
        self._check_count("advantages", advantages, inputs)
        if not isinstance(advantages, Tensor) and all(type(a) is float for a in advantages):
            advantages = torch.tensor(advantages, dtype=torch.float32)  # read by the loss and by every metric
        is_whole_step = totals is None
        if totals is None:
            totals = Totals(
                sequences=len(inputs), tokens=sum(f.num_scored for f in inputs), step=self.version
            )  # fmt: skip
        if ref_logps is None and "ref_logps" in self.loss.needs and any(f.ref_logps is None for f in inputs):
            ref_logps = self.reference_logps(inputs)
        given = {"old_logps": old_logps, "ref_logps": ref_logps, "sampler_logps": sampler_logps}
        for name, values in given.items():
            if values is not None:
                self._check_count(name, values, inputs)
        if self.loss.surveys:
            totals = survey_step(
                self.loss,
                self.forward_only,
                inputs,
                advantages=advantages,
                old_logps=old_logps,
                sampler_logps=sampler_logps,
                totals=totals,
                is_whole_step=is_whole_step,
                device=self.device,
            )
        live = _live(self.loss, advantages)
        if live is not None:
            self._measure_skipped(inputs, set(live), old_logps, sampler_logps)
            inputs, advantages = [inputs[i] for i in live], _select(advantages, live)
            given = {name: None if values is None else _select(values, live) for name, values in given.items()}
        loss = torch.zeros((), device=self.device)
        terms: dict[str, Tensor] = {}
        on_policy, rejected = True, None
        for part, batch in self.batches.make(inputs, self.tokens_per_microbatch):
            if self.loss.draws_tokens:
                ids = part if live is None else [live[i] for i in part]
                batch = replace(batch, sequence_ids=torch.tensor(ids, device=self.device))
            from_features = {"old_logps": batch.old_logps, "ref_logps": batch.ref_logps, "sampler_logps": None}
            aligned: dict[str, Any] = {
                name: from_features[name] if values is None else _placed(name, _select(values, part), batch)
                for name, values in given.items()
            }
            aligned["advantages"] = _select(advantages, part)
            result, outputs = loss_and_backward(self.scorer, batch, self.loss, totals, aligned)
            self.weights.collect_gradients()
            loss = loss + result.loss.detach()
            for name, value in result.terms.items():
                terms[name] = terms.get(name, 0) + value
            on_policy = on_policy and result.on_policy
            if result.rejected is not None:
                rejected = result.rejected if rejected is None else rejected + result.rejected
            self._observe(batch, outputs, aligned)
        return LossOutput(loss=loss, terms=terms, on_policy=on_policy, rejected=rejected)

    def clip_grad_and_step(self, max_grad_norm: float | None = 1.0) -> StepReport:
        """Clip the gradient, step, move the schedule on. A non-finite gradient changes nothing and is reported."""
        schedule, warmup_steps, total_steps = self._schedule
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self._base_lr * schedule_factor(schedule, self.version, warmup_steps, total_steps)
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

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the model (with LoRA: the adapter) as transformers, PEFT and vLLM load it."""
        from gruppo.model.checkpoint import save_pretrained

        save_pretrained(self.model, self.tokenizer, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote into this model."""
        from gruppo.model.checkpoint import load_pretrained

        load_pretrained(self.model, Path(folder))
        if self._weights is not None:
            self._weights.read_again()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _observe(self, batch: PackedBatch, outputs: dict[str, Tensor], aligned: dict[str, Any]) -> None:
        observed = {name: values.detach() for name, values in outputs.items()}
        # Without old_logps the loss took the policy's own: ratio 1, which a metric should show and not omit.
        old = observed["logps"] if aligned["old_logps"] is None else aligned["old_logps"]
        if aligned["sampler_logps"] is not None:
            self.mismatch.accumulate(batch.loss_inputs(), old_logps=old, sampler_logps=aligned["sampler_logps"])
        if not self.metrics:
            return
        inputs, advantages = batch.loss_inputs(), aligned["advantages"]
        is_live = [_has_advantage(value) for value in _values(advantages)]
        if not all(is_live):
            live_T = batch.segments.spread(torch.tensor(is_live, device=self.device))
            if not isinstance(advantages, Tensor):
                advantages = _placed("advantages", advantages, batch) if _is_nested(advantages) else advantages
            inputs = inputs | {"labels": torch.where(live_T, batch.labels, IGNORE_INDEX)}
        for metric in self.metrics:
            metric.accumulate(inputs, observed, old_logps=old, advantages=advantages)

    def _measure_skipped(
        self,
        inputs: Sequence[InputFeature],
        live: set[int],
        old_logps: PerSequence | None,
        sampler_logps: PerSequence | None,
    ) -> None:
        """Count sequences that are not trained on in the gap between sampler and trainer: they are part of it too."""
        skipped = [i for i, feature in enumerate(inputs) if i not in live and feature.num_scored]
        if sampler_logps is None or not skipped:
            return
        features = [inputs[i] for i in skipped]
        if old_logps is not None:
            old = _select(old_logps, skipped)
        elif features[0].old_logps is not None:
            old = [feature.old_logps for feature in features]
        else:
            old = self.forward_only(features)["logps"]
        batch = pack(features).to(self.device)
        rows = {"old_logps": old, "sampler_logps": _select(sampler_logps, skipped)}
        placed: dict[str, Any] = {name: _placed(name, values, batch) for name, values in rows.items()}
        self.mismatch.accumulate(batch.loss_inputs(), **placed)

    def _check_count(self, name: str, values: PerSequence, inputs: Sequence[InputFeature]) -> None:
        if len(values) != len(inputs):
            raise InputError(f"{name} has {len(values)} entries for {len(inputs)} sequences; give one per sequence")


def _check_features(inputs: Sequence[InputFeature]) -> None:
    for i, feature in enumerate(inputs):
        if not isinstance(feature, InputFeature):
            raise InputError(f"inputs[{i}] must be an InputFeature, got {type(feature).__name__}")


def _select(values: PerSequence, part: list[int]) -> Any:
    return values[part] if isinstance(values, Tensor) else [values[i] for i in part]


def _placed(name: str, rows: Any, batch: PackedBatch) -> Tensor:
    """One row of values per sequence as a tensor over the slots, made once for loss and metrics."""
    if isinstance(rows, Tensor) and rows.shape == batch.labels.shape:
        return rows
    for i, (row, length) in enumerate(zip(rows, batch.segments.length.tolist(), strict=True)):
        if len(row) != length:
            raise InputError(
                f"{name} of sequence {i} has {len(row)} entries for {length} scored tokens; "
                "give exactly one value per token whose label is not masked"
            )
    if len(rows) and isinstance(rows[0], Tensor):
        values = torch.cat(list(rows)).to(torch.float32)
    else:
        values = torch.tensor([x for row in rows for x in row], dtype=torch.float32)
    placed = torch.zeros(batch.num_slots, device=batch.labels.device)
    return placed.masked_scatter(batch.labels != IGNORE_INDEX, values.to(placed.device))


def _values(advantages: PerSequence) -> Sequence[Any]:
    return advantages.tolist() if isinstance(advantages, Tensor) else advantages


def _is_nested(advantages: Sequence[Any]) -> bool:
    """Is there one list of advantages per sequence, rather than one number?"""
    return any(not isinstance(value, int | float) for value in advantages)


def _has_advantage(value: Any) -> bool:
    """Does a sequence with this advantage, or these per token, have one other than 0?"""
    if isinstance(value, int | float):
        return value != 0
    return any(x != 0 for x in _values(value))


def _live(loss: PolicyLoss, advantages: PerSequence) -> list[int] | None:
    """The sequences that can have a gradient, when others cannot; None when all of them are to be computed."""
    if not loss.is_zero_without_advantage:
        return None
    values = _values(advantages)
    live = [i for i, value in enumerate(values) if _has_advantage(value)]
    return live if len(live) < len(values) else None


def _switch_off_dropout(model: nn.Module) -> None:
    """Dropout makes the same weights score the same tokens differently: the ratio would not be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
