"""PackedBatch: rollouts as flat tensors; and Totals: the numbers that a whole step divides by.

The one shift by one of a run is in `pack`: `labels[t]` is token t + 1 of the same sequence when that token is scored,
else -100. The last token of a sequence predicts nothing and gets no slot: n tokens make n - 1 slots. (A one-token
sequence keeps its slot, unscored, so that no sequence vanishes from the layout.)
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX, Segments
from gruppo.errors import InputError
from gruppo.types import InputFeature, Rollout

PerSequence = Tensor | Sequence[Any]
"""One value per sequence, or one list of values per scored token of each."""
Count = int | float | Tensor  # a 0-d tensor where the labels live on a GPU: counting must not make the host wait


class _Tensors:
    """Dataclasses of tensors that move to a device together."""

    __slots__ = ()

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]  # the subclasses are dataclasses
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = value.to(device, non_blocking=True)
            elif isinstance(value, _Tensors):
                moved[each.name] = value.to(device)
            elif isinstance(value, dict):
                moved[each.name] = {}  # masks that kernels made on the other device
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts(_Tensors):
    """Rows of W slots in which each prompt is computed once: first the prompts of the row, then the completions.

    Prompt [5, 6] with completions [7, 8, 2] and [9, 2] (a completion's last token predicts nothing and has no slot):

        slot           0   1  |  2   3  |  4
        input_ids      5   6  |  7   8  |  9
        position_ids   0   1  |  2   3  |  2
        own_start      0   0     2   2     4
        prompt_start   0   0     0   0     0
        prompt_stop    0   0     2   2     2

    A slot q may look at the slots `own_start[q]..q` of its own segment and at `prompt_start[q]..prompt_stop[q] - 1`,
    the prompt of its group; for a slot of a prompt the second range is empty. Padding looks at itself only.
    """

    input_ids: Tensor  # [R, W] int64
    position_ids: Tensor  # [R, W] int64
    own_start: Tensor  # [R, W] int32
    prompt_start: Tensor  # [R, W] int32
    prompt_stop: Tensor  # [R, W] int32
    slot_of: Tensor  # [T] int64: for each slot of the packed batch its slot in the flattened rows
    num_slots: int  # slots without padding
    tiles: Tensor | None = None  # [N, 7] int32: the row cut into tiles of segments, see `tiles_of`; None: several rows
    masks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Masks that attention kernels made of the ranges, once for all layers."""

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    @property
    def row_length(self) -> int:
        return self.input_ids.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(_Tensors):
    """Sequences one after the other, without padding, with everything the loss needs per token.

    `T` slots, `S` sequences, `N` scored slots. `pack` has an example.
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64: the token scored at the slot, or -100
    position_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int64: first slot of each sequence, then T
    scored: Tensor  # [N] int64: the slots that are scored
    offsets: Tensor  # [S + 1] int64: first of each sequence among the scored slots, then N
    lengths: tuple[int, ...]  # scored slots of each sequence, on the host
    indices: tuple[int, ...] = ()  # which rollouts of a step the sequences are
    advantages: Tensor  # [T] float32, 0 where not scored; so the next three
    old_logps: Tensor | None = None  # [T] float32
    ref_logps: Tensor | None = None  # [T] float32
    sampler_logps: Tensor | None = None  # [T] float32
    distinct: Tensor | None = None  # [U] int64: sequences with different input_ids, the first of each kind
    kind: Tensor | None = None  # [S] int64: which of `distinct` a sequence has the input_ids of
    sequence_ids: Tensor | None = None  # [S] int64: which sequence of the step each is, for losses that draw tokens
    shared: SharedPrompts | None = None  # the rows in which the body computes each prompt once
    in_one_row: bool = False  # the body runs over all sequences in one row; attention keeps them apart

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_slots(self) -> int:
        return len(self.input_ids)

    @property
    def segments(self) -> Segments:
        """The sequences over their scored slots alone, `[N]`."""
        bits = torch.full(self.scored.shape, -1, dtype=torch.int32, device=self.offsets.device)
        return Segments(bits, self.offsets, self.offsets.diff(), None)

    def loss_inputs(self) -> dict[str, Tensor]:
        """The mapping that a loss or a metric takes as `inputs` when it is called over all slots, `[T]`."""
        return {"labels": self.labels, "position_ids": self.position_ids, "cu_seqlens": self.cu_seqlens}


def pack(inputs: Sequence[Rollout | InputFeature]) -> PackedBatch:
    """Lay the sequences one after the other.

    >>> batch = pack([InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8)),
    ...               InputFeature(prompt_ids=(5,), completion_ids=(9, 2))])
    >>> for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "scored", "offsets"):
    ...     print(f"{name:12}", getattr(batch, name).tolist())
    input_ids    [5, 6, 7, 5, 9]
    labels       [-100, 7, 8, 9, 2]
    position_ids [0, 1, 2, 0, 1]
    cu_seqlens   [0, 3, 5]
    scored       [1, 2, 3, 4]
    offsets      [0, 2, 4]
    """
    rollouts = as_rollouts(inputs)
    input_ids: list[int] = []
    labels: list[int] = []
    num_slots: list[int] = []  # of each sequence
    kinds: dict[tuple[int, ...], int] = {}
    kind: list[int] = []
    distinct: list[int] = []
    values: dict[str, list[float]] = {"advantages": []}  # of the scored tokens, in the order of the sequences
    for i, rollout in enumerate(rollouts):
        prompt, tokens = rollout.trajectory.prompt_ids, rollout.trajectory.tokens
        if not prompt:
            raise InputError(f"inputs[{i}] has no prompt token; its first completion token has nothing to follow")
        num_slots.append(max(len(prompt) + len(tokens) - 1, 1))
        body = (prompt + tokens)[: num_slots[-1]]
        input_ids += body
        kind.append(kinds.setdefault(body, len(kinds)))
        if kind[-1] == len(distinct):
            distinct.append(i)
        labels += [IGNORE_INDEX] * (len(body) - len(tokens))
        if rollout.is_masked:
            labels += [IGNORE_INDEX] * len(tokens)
        elif rollout.trajectory.sampled is None:
            labels += tokens
        else:
            labels += [t if s else IGNORE_INDEX for t, s in zip(tokens, rollout.trajectory.sampled, strict=True)]
        if not isinstance(rollout.advantage, tuple):
            values["advantages"] += [rollout.advantage] * rollout.num_scored
        elif not rollout.is_masked:
            values["advantages"] += rollout.advantage
    rows = {
        "old_logps": [rollout.old_logps for rollout in rollouts],
        "ref_logps": [rollout.ref_logps for rollout in rollouts],
        "sampler_logps": [rollout.trajectory.logps for rollout in rollouts],
    }
    for name, row_of in rows.items():
        given = [row for row in row_of if row is not None]
        if given and len(given) < len(rollouts):
            i = row_of.index(None)
            raise InputError(f"{name} is set on some sequences and missing on inputs[{i}]; set it on all or none")
        if given:
            values[name] = [x for row, r in zip(given, rollouts, strict=True) if not r.is_masked for x in row]
    labels_T = tensor_of(labels)
    scored = (labels_T != IGNORE_INDEX).nonzero().squeeze(1)
    lengths = tuple(rollout.num_scored for rollout in rollouts)
    placed: dict[str, Any] = {
        name: torch.zeros(len(labels), dtype=torch.float32).index_copy_(0, scored, tensor_of(of_scored, torch.float32))
        for name, of_scored in values.items()
    }
    cu_seqlens = tensor_of([0, *accumulate(num_slots)])
    return PackedBatch(
        input_ids=tensor_of(input_ids),
        labels=labels_T,
        position_ids=torch.arange(len(labels)) - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff()),
        cu_seqlens=cu_seqlens,
        scored=scored,
        offsets=torch.tensor([0, *accumulate(lengths)], dtype=torch.int64),
        lengths=lengths,
        distinct=torch.tensor(distinct, dtype=torch.int64),
        kind=torch.tensor(kind, dtype=torch.int64),
        **placed,
    )


def tensor_of(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Plain numbers as a tensor; several times as fast as `torch.tensor` on a long list."""
    if not values:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(array("q" if dtype == torch.int64 else "f", values), dtype=dtype)


def as_rollouts(inputs: Sequence[Any]) -> list[Rollout]:
    """Rollouts of sequences in either form."""
    for i, each in enumerate(inputs):
        if not isinstance(each, Rollout | InputFeature):
            raise InputError(f"inputs[{i}] must be a Rollout or an InputFeature, got {type(each).__name__}")
    return [each if isinstance(each, Rollout) else each.rollout() for each in inputs]


def with_given(inputs: Sequence[Any], given: dict[str, PerSequence | None]) -> list[Rollout]:
    """Rollouts of sequences whose advantages and log-probs were given separately."""
    rollouts = as_rollouts(inputs)
    columns: dict[str, list[Any]] = {}
    for name, values in given.items():
        if values is None:
            continue
        title = {"advantage": "advantages", "logps": "sampler_logps"}.get(name, name)
        if len(values) != len(rollouts):
            raise InputError(f"{title} has {len(values)} entries for {len(rollouts)} sequences; give one per sequence")
        columns[name] = [_plain(title, i, v, r) for i, (v, r) in enumerate(zip(_listed(values), rollouts, strict=True))]
    if not columns:
        return rollouts
    made = []
    for i, rollout in enumerate(rollouts):
        fields = {name: values[i] for name, values in columns.items()}
        if "logps" in fields:
            fields["trajectory"] = replace(rollout.trajectory, logps=fields.pop("logps"))
        made.append(replace(rollout, **fields))
    return made


def _listed(values: PerSequence) -> Sequence[Any]:
    return values.tolist() if isinstance(values, Tensor) else values


def _plain(title: str, index: int, value: Any, rollout: Rollout) -> float | tuple[float, ...]:
    """A number, or one per scored token, as plain Python."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, int | float):
        if title != "advantages":
            raise InputError(f"{title}[{index}] must hold one number per scored token, got {value!r}")
        return float(value)
    row = tuple(float(x) for x in value)
    if len(row) != rollout.trajectory.num_sampled:
        raise InputError(
            f"{title} of sequence {index} has {len(row)} entries for {rollout.trajectory.num_sampled} scored tokens; "
            "give exactly one value per token whose label is not masked"
        )
    return row


def pack_rows(values_BL: Tensor, attention_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the padding of each row and lay the rows one after the other: `([T], cu_seqlens [B + 1])`.

    >>> pack_rows(torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, 1], [1, 1, 0]]))
    (tensor([1, 2, 3, 4]), tensor([0, 2, 4]))
    """
    if values_BL.shape[:2] != attention_BL.shape:
        raise InputError(
            f"values have shape {tuple(values_BL.shape)} and attention_mask {tuple(attention_BL.shape)}; "
            "the first two axes must agree"
        )
    kept_BL = attention_BL != 0
    offsets = torch.cat([kept_BL.new_zeros(1, dtype=torch.int64), kept_BL.sum(1).cumsum(0)])
    return values_BL[kept_BL], offsets


def usual_width(longest: int) -> int:
    """Next larger of 16 widths per doubling, at most 6 % more from 256 on, because cuDNN's attention plans each new
    width.

    >>> [usual_width(n) for n in (1, 100, 250, 1030, 20000)]
    [16, 112, 256, 1088, 20480]
    """
    step = max(16, 2 ** (longest.bit_length() - 1) // 16)
    return -(-longest // step) * step


def pad_tokens(values_T: Tensor, cu_seqlens: Tensor, fill: int | float, *, rounds: bool = False) -> Tensor:
    """Packed to padded: sequence i becomes row i, padded on the right with `fill`, `[S, longest]`.

    Args:
        rounds: to a usual width.

    >>> pad_tokens(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), fill=0)
    tensor([[1, 0],
            [2, 3]])
    """
    lengths_S = cu_seqlens.diff()
    longest = int(lengths_S.max()) if len(lengths_S) else 0
    column_L = torch.arange(usual_width(longest) if rounds else longest, device=values_T.device)
    used_SL = column_L[None, :] < lengths_S[:, None]
    rows = values_T.new_full((len(lengths_S), len(column_L), *values_T.shape[1:]), fill)
    rows[used_SL] = values_T
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of one optimizer step, over all micro-batches and ranks, made before the first forward.

    >>> Totals.over([Totals(sequences=2, tokens=5), Totals(sequences=1, tokens=4)])
    Totals(sequences=3, tokens=9, local_tokens=9, local_share=1.0, step=0, survey=None)
    """

    sequences: Count
    tokens: Count
    local_tokens: Count | None = None
    """Tokens of the local batch, for the one aggregation that has one (BNPO). Unset: of the whole step, as in a run."""
    local_share: float = 1.0
    """Share of that batch in the step, 1 / (number of local batches), for the same."""
    step: int = 0
    """Number of the optimizer step, so that a loss that draws tokens draws different ones each step."""
    survey: Mapping[str, Tensor] | None = None
    """More numbers of the whole step that a loss reads, from `loss.survey(...)`."""

    def __post_init__(self) -> None:
        if self.local_tokens is None:
            object.__setattr__(self, "local_tokens", self.tokens)

    def number(self, name: str) -> Tensor:
        """Number from the survey, `[]`."""
        if self.survey is None or name not in self.survey:
            raise InputError(
                f"totals hold no {name!r}: this loss looks at the whole step. Make the totals of a step with "
                "loss.survey(...) over all its sequences before the first micro-batch"
            )
        return self.survey[name]

    @classmethod
    def of_step(cls, rollouts: Sequence[Rollout], step: int = 0) -> "Totals":
        """Totals of a step with these rollouts."""
        return cls(sequences=len(rollouts), tokens=sum(r.num_scored for r in rollouts), step=step)

    @classmethod
    def of(cls, segments: Segments) -> "Totals":
        """Totals if this batch is the whole step."""
        return cls(sequences=segments.num_sequences, tokens=segments.length.sum())

    @classmethod
    def over(cls, parts: Iterable["Totals"]) -> "Totals":
        """Totals of a step of several micro-batches on one rank."""
        parts = list(parts)
        return cls(sequences=sum(p.sequences for p in parts), tokens=sum(p.tokens for p in parts))
