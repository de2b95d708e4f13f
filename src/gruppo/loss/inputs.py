"""LossInputs: the aligned and masked tensors that losses and metrics compute on.

Training makes them from a `PackedBatch`, which is aligned already. When a loss is called by hand, `align` converts
every accepted form into one: each per-token tensor is `[T]`, in float32 (float64 if the log-probs are), and exactly 0,
without gradient, in unscored slots, whatever they held before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gruppo.batch.packed import PackedBatch, Totals
from gruppo.batch.segments import IGNORE_INDEX, Segments, offsets_from_positions
from gruppo.errors import InputError
from gruppo.kernel.logps import logps_and_entropy
from gruppo.random import token_places

PerToken = Tensor | Sequence[Sequence[float] | Tensor]
"""Shape of the labels, or one list per sequence with exactly one value per scored token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Aligned inputs of a loss or metric; `T` slots, `S` sequences."""

    labels: Tensor  # [T] int64
    logps: Tensor  # [T] with gradient
    old_logps: Tensor  # [T] under the policy that sampled; logps without gradient if on-policy
    advantages: Tensor  # [T]
    segments: Segments
    totals: Totals
    on_policy: bool = False  # no old_logps were given: the ratio is 1 by definition
    has_advantages: bool = True  # False: none were given, and they are 0
    ref_logps: Tensor | None = None  # [T]
    sampler_logps: Tensor | None = None  # [T] as the sampler computed them
    entropies: Tensor | None = None  # [T] with gradient
    places: Tensor | None = None  # [T] int64, a key of the token's place in the step; only for losses that draw
    positions: Tensor | None = None  # [T] int64, slot within its sequence; None: as `segments` lays them out

    @classmethod
    def of(cls, batch: PackedBatch, logps: Tensor, entropies: Tensor | None, totals: Totals) -> "LossInputs":
        """The inputs of a batch whose scored tokens have these log-probs; `T` is their number."""
        segments, scored = batch.segments, batch.scored
        given = {"old_logps": batch.old_logps, "ref_logps": batch.ref_logps, "sampler_logps": batch.sampler_logps}
        taken: dict[str, Any] = {"old_logps": logps.detach()}
        taken |= {name: values[scored].to(logps.dtype) for name, values in given.items() if values is not None}
        return cls(
            labels=batch.labels[scored],
            logps=logps,
            advantages=batch.advantages[scored].to(logps.dtype),
            segments=segments,
            totals=totals,
            on_policy=batch.old_logps is None,
            entropies=entropies,
            places=None if batch.sequence_ids is None else token_places(batch.sequence_ids, segments),
            positions=batch.position_ids[scored],
            **taken,
        )

    def of_live(self) -> "LossInputs":
        """The same without gradients, and without sequences of zero advantage, which metrics do not count."""
        is_live_S = self.segments.sum((self.advantages != 0).to(self.logps.dtype)) > 0
        segments = self.segments.restricted(self.segments.spread(is_live_S))
        names = ("logps", "old_logps", "advantages", "entropies", "sampler_logps")
        kept = {name: segments.keep(values.detach()) for name in names if (values := getattr(self, name)) is not None}
        return replace(self, segments=segments, **kept)

    def window(self, rows: slice, logps: Tensor, entropies: Tensor | None) -> "LossInputs":
        """Inputs of a window of slots whose log-probs were just computed.

        A sequence cut by the window keeps its full length, which aggregations divide by.
        """
        names = ("labels", "old_logps", "advantages", "ref_logps", "sampler_logps", "places")
        cut = {name: values[rows] for name in names if (values := getattr(self, name)) is not None}
        if self.on_policy:
            cut["old_logps"] = logps.detach()
        return replace(self, logps=logps, entropies=entropies, segments=self.segments.window(rows), **cut)


def align(
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    advantages: Tensor | Sequence[float] | PerToken | None,
    old_logps: PerToken | None = None,
    ref_logps: PerToken | None = None,
    sampler_logps: PerToken | None = None,
    totals: Totals | None = None,
    ignore_index: int = IGNORE_INDEX,
    with_places: bool = False,
) -> LossInputs:
    """Convert the arguments of a loss call to the internal form. `advantages=None` counts as all zero."""
    labels = _field(inputs, "labels", "inputs")
    segments = _segments(inputs, labels, ignore_index)
    outputs = _with_logps(outputs, labels, segments)
    logps = _flat_tensor("logps", outputs["logps"], labels)
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    aligner = _Aligner(labels, segments, dtype, logps.device)
    logps_T = segments.keep(logps.to(dtype))
    old_T = logps_T if old_logps is None else aligner.per_token("old_logps", old_logps)
    return LossInputs(
        labels=labels.reshape(-1),
        logps=logps_T,
        old_logps=old_T.detach(),  # a constant, whatever graph it came with: else the gradient of the ratio cancels
        advantages=aligner.advantages(advantages).detach(),
        segments=segments,
        totals=Totals.of(segments) if totals is None else totals,
        on_policy=old_logps is None,
        has_advantages=advantages is not None,
        ref_logps=None if ref_logps is None else aligner.per_token("ref_logps", ref_logps).detach(),
        sampler_logps=None if sampler_logps is None else aligner.per_token("sampler_logps", sampler_logps).detach(),
        entropies=aligner.per_token("entropies", outputs["entropies"]) if "entropies" in outputs else None,
        places=_places(inputs, segments, is_whole_step=totals is None) if with_places else None,
    )


@dataclass(frozen=True, slots=True)
class _Aligner:
    labels: Tensor
    segments: Segments
    dtype: torch.dtype
    device: torch.device

    def per_token(self, name: str, value: PerToken) -> Tensor:
        """A value per slot `[T]`, from a tensor of the labels' shape or from one list per sequence."""
        segments = self.segments
        if isinstance(value, Tensor):
            return segments.keep(_flat_tensor(name, value, self.labels).to(self.device, self.dtype))
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InputError(
                f"{name} must be a tensor of the labels' shape or one list per sequence, got {type(value).__name__}"
            )
        if len(value) != segments.num_sequences:
            raise InputError(
                f"{name} has {len(value)} lists for {segments.num_sequences} sequences; give one per sequence"
            )
        rows: list[Tensor] = []
        for i, (row, length) in enumerate(zip(value, segments.length.tolist(), strict=True)):
            if not isinstance(row, Tensor | Sequence) or isinstance(row, str):
                kind = type(row).__name__
                raise InputError(f"{name}[{i}] must hold one number per scored token of sequence {i}, got {kind}")
            try:
                rows.append(row if isinstance(row, Tensor) else torch.tensor(row, dtype=torch.float64))
            except (TypeError, ValueError):
                raise InputError(f"{name}[{i}] must be a list of numbers, got {row!r}") from None
            if rows[i].dim() != 1 or not rows[i].dtype.is_floating_point:
                got = f"{rows[i].dtype} of shape {tuple(rows[i].shape)}"
                raise InputError(f"{name}[{i}] must be a list of numbers, got {got}")
            if len(row) != length:
                raise InputError(
                    f"{name} of sequence {i} has {len(row)} entries for {length} scored tokens; "
                    "give exactly one value per token whose label is not masked"
                )
        values = torch.cat(rows).to(self.dtype) if rows else torch.zeros(0, dtype=self.dtype)
        placed_T = torch.zeros(segments.num_slots, dtype=self.dtype, device=self.device)
        return placed_T.masked_scatter(segments.mask, values.to(self.device))

    def advantages(self, value: Tensor | Sequence[float] | PerToken | None) -> Tensor:
        """An advantage per slot `[T]`, from one per sequence or one per token; 0 without any."""
        num_sequences = self.segments.num_sequences
        if value is None:
            return torch.zeros(self.segments.num_slots, dtype=self.dtype, device=self.device)
        if not isinstance(value, Tensor | Sequence) or isinstance(value, str):
            raise InputError(f"advantages must be one number per sequence or per token, got {value!r}")
        if not isinstance(value, Tensor):
            if any(isinstance(v, Sequence) or (isinstance(v, Tensor) and v.dim()) for v in value):
                return _finite(self.per_token("advantages", value))  # type: ignore[arg-type]  # checked item by item
            try:
                value = torch.tensor(value, dtype=self.dtype)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(f"advantages must be numbers, got {value!r}") from None
        if value.is_complex() or value.dtype == torch.bool:
            raise InputError(f"advantages must be numbers, got dtype {value.dtype}")
        value = value.to(self.device, self.dtype)
        if value.shape == (num_sequences,):
            return self.segments.spread(_finite(value))
        if _is_aligned(value, self.labels):
            return _finite(self.segments.keep(value.reshape(-1)))
        raise InputError(
            f"advantages has shape {tuple(value.shape)}; expected one value per sequence ({num_sequences},) "
            f"or one per label {tuple(self.labels.shape)}. Rows of a padded batch hold one sequence each; "
            "a packed batch is [T] or [1, T] with position_ids or cu_seqlens"
        )


def _field(mapping: Mapping[str, Any], name: str, where: str) -> Tensor:
    if name not in mapping:
        raise InputError(f"{where} has no {name!r}; it has {sorted(map(str, mapping))}")
    value = mapping[name]
    if not isinstance(value, Tensor):
        raise InputError(f"{where}[{name!r}] must be a tensor, got {type(value).__name__}")
    return value


def _segments(inputs: Mapping[str, Any], labels: Tensor, ignore_index: int) -> Segments:
    if labels.dtype.is_floating_point or labels.dtype == torch.bool or labels.dim() not in (1, 2):
        raise InputError(
            f"labels must be token ids of shape [B, L], [1, T] or [T], got {labels.dtype} {tuple(labels.shape)}"
        )
    mask = labels.to(torch.int32, copy=True).ne_(ignore_index)  # 0 and 1: bool takes twice as long on a CPU
    cu_seqlens, position_ids = inputs.get("cu_seqlens"), inputs.get("position_ids")
    for name, value in (("cu_seqlens", cu_seqlens), ("position_ids", position_ids)):
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"inputs[{name!r}] must be a tensor, got {type(value).__name__}")
    if cu_seqlens is not None:
        if not _is_packed_row(labels):
            raise InputError(
                f"cu_seqlens goes with packed labels [T] or [1, T], got labels of shape {tuple(labels.shape)}"
            )
        return Segments.from_offsets(mask.reshape(-1), cu_seqlens.to(labels.device, torch.int64))
    if position_ids is not None and _is_packed_row(labels):
        _check_same_shape("position_ids", position_ids, labels)
        attention = inputs.get("attention_mask")
        if attention is not None:
            _check_same_shape("attention_mask", attention, labels)
            attention = attention.reshape(-1)
        offsets = offsets_from_positions(position_ids.reshape(-1), mask.reshape(-1).bool(), attention)
        return Segments.from_offsets(mask.reshape(-1), offsets)
    if labels.dim() == 1:
        raise InputError("labels of shape [T] are packed: inputs need position_ids or cu_seqlens as well")
    return Segments.from_rows(mask)


def _places(inputs: Mapping[str, Any], segments: Segments, *, is_whole_step: bool) -> Tensor:
    ids = inputs.get("sequence_ids")
    if ids is None:
        if not is_whole_step:
            raise InputError(
                "this loss draws tokens by their place in the step: inputs of a micro-batch need 'sequence_ids', the "
                "index of each of its sequences in the step"
            )
        ids = torch.arange(segments.num_sequences)
    ids = torch.as_tensor(ids)
    if ids.shape != (segments.num_sequences,):
        raise InputError(f"sequence_ids has shape {tuple(ids.shape)} for {segments.num_sequences} sequences")
    return token_places(ids.to(segments.bits.device), segments)


def _with_logps(outputs: Mapping[str, Any], labels: Tensor, segments: Segments) -> Mapping[str, Any]:
    if "logps" in outputs:
        return outputs
    if "logits" not in outputs:
        raise InputError(f"outputs needs 'logps' or 'logits'; it has {sorted(map(str, outputs))}")
    logits = _field(outputs, "logits", "outputs")
    if logits.shape[:-1] != labels.shape:
        raise InputError(
            f"logits have shape {tuple(logits.shape)} for labels {tuple(labels.shape)}; expected labels' shape and "
            "the vocabulary. labels[t] is the token scored at slot t: the shift by one is the caller's"
        )
    # Whatever a non-scored slot holds, its label must be a valid index; the result there is masked anyway.
    labels = torch.where(segments.mask.view(labels.shape), labels, IGNORE_INDEX)
    logps, entropies = logps_and_entropy(logits, labels)
    return {"logps": logps, "entropies": entropies}


def _flat_tensor(name: str, value: Any, labels: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor of the labels' shape, got {type(value).__name__}")
    if not value.dtype.is_floating_point:
        raise InputError(f"{name} must be floating point, got {value.dtype}; were token ids passed instead?")
    _check_same_shape(name, value, labels)
    return value.reshape(-1)


def _is_packed_row(labels: Tensor) -> bool:
    return labels.dim() == 1 or len(labels) == 1


def _is_aligned(value: Tensor, labels: Tensor) -> bool:
    is_row = _is_packed_row(labels) and value.numel() == labels.numel() and value.dim() <= 2
    return value.shape == labels.shape or is_row


def _check_same_shape(name: str, value: Tensor, labels: Tensor) -> None:
    if not _is_aligned(value, labels):
        raise InputError(
            f"{name} has shape {tuple(value.shape)} and labels {tuple(labels.shape)}; they must be aligned slot by slot"
        )


def _finite(advantages: Tensor) -> Tensor:
    """The same advantages; an error if one is not finite."""
    if not advantages.is_cuda and math.isfinite(advantages.sum().item()):
        return advantages  # one fast pass; a sum of finite values may overflow, so check each one then
    finite = advantages.isfinite()
    if advantages.is_cuda:
        # The host does not wait for the answer; a failure stops the next CUDA call.
        torch._assert_async(finite.all())  # pyright: ignore[reportPrivateImportUsage]  no public name
    elif not finite.all():
        where = int((~finite).nonzero()[0, 0])
        raise InputError(
            f"advantages[{where}] is {advantages[where].item()}; "
            "advantages must be finite: drop the sequence or fix its reward"
        )
    return advantages
