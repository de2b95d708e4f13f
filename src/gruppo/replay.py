"""Replay of a step: other losses and advantages on the rollouts that a run has recorded.

With the weights that the run had before the step (a checkpoint, or the base model for step 1) the updates of the step
are taken again, and the gradients of all losses are compared in its last one. The run's own loss gives the recorded
gradient norm. Without those weights the recorded log-probs stand in: gradients are then those of the log-probs,
d loss / d logp, which is each token's credit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppo.batch import PackedBatch, Totals, pack
from gruppo.codec import decode
from gruppo.errors import InputError
from gruppo.loss import PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.metric import metric_for
from gruppo.reward import RewardShape
from gruppo.run.checkpoints import Checkpoints
from gruppo.run.reader import RunReader
from gruppo.trainer import build
from gruppo.trainer.advantages import AdvantageAssigner
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.inputs import MARK, Inputs, resolve_inputs
from gruppo.trainer.learner import Learner, minibatch_parts
from gruppo.trainer.state import Snapshots
from gruppo.types import Group, Rollout
from gruppo.weights.source import load_tokenizer

if TYPE_CHECKING:
    from gruppo.model import TransformersModel

OPTIONS_OF_A_LOSS = ("clip_range", "tau", "loss_options")
"""Options of a run that belong to its own loss: another has its own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A loss with an advantage, on the rollouts of a step."""

    loss: str
    advantage: str
    value: float
    """The loss."""
    terms: dict[str, float]
    grad_norm: float
    """Norm of the gradient of the weights; without weights of that of the log-probs."""
    clipped: float | None
    """Share that the loss clips, as `live/clip_ratio` counts it; None: it clips nothing."""
    masked: float
    """Share of tokens with an advantage that weights of the loss leave out."""
    moved: float
    """Share of the credit that falls on other tokens than with the first variant, or has the opposite sign there."""
    lost: int
    """Tokens that have credit with the first variant and none with this one."""
    gained: int
    """Tokens that have credit only with this variant."""
    flipped: int
    """Tokens whose credit has the other sign."""
    advantages: list[float | list[float]]
    """Of each rollout: one number, or one per sampled token."""
    credit: list[list[float]]
    """d loss / d logp of each sampled token of each rollout; a negative one makes the token likelier."""

    @property
    def name(self) -> str:
        return f"{self.loss} + {self.advantage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of several losses on one step. The first variant is the run's own."""

    run: str
    step: int
    update: int
    """Number of the replayed update of the step: the last one."""
    weights: str | None
    """Source of the weights; None: the recorded log-probs were used."""
    recorded_norm: float | None
    """`optim/grad_norm` of the step: the mean over its updates."""
    replayed_norm: float | None
    """The same with the run's own loss; None without weights."""
    variants: list[Variant]
    cosine: list[list[float]]
    """Cosines between the gradients of all variants."""
    rollouts: list[tuple[int, int]]
    """Prompt and sample of each rollout, as in the completions of the step."""
    rows: list[int]
    """Row of each rollout in the completions of the step."""
    sampled: list[list[bool]]
    """Tokens of each rollout that the policy sampled; only these have credit."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values for a file or a page; credit has null at tokens that the policy did not sample."""
        variants = [
            {"name": v.name, "loss": v.loss, "advantage": v.advantage, "value": v.value, "terms": v.terms}
            | {"grad_norm": v.grad_norm, "clipped": v.clipped, "masked": v.masked}
            | {"moved": v.moved, "lost": v.lost, "gained": v.gained, "flipped": v.flipped}
            for v in self.variants
        ]
        completions = [
            {
                "prompt_index": prompt,
                "sample": sample,
                "row": self.rows[i],
                "advantage": [variant.advantages[i] for variant in self.variants],
                "credit": [_spread(variant.credit[i], self.sampled[i]) for variant in self.variants],
            }
            for i, (prompt, sample) in enumerate(self.rollouts)
        ]
        names = ("run", "step", "update", "weights", "recorded_norm", "replayed_norm", "cosine", "notes")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"variants": variants, "completions": completions}


def _spread(values: list[float], sampled: list[bool]) -> list[float | None]:
    given = iter(values)
    return [next(given) if is_sampled else None for is_sampled in sampled]


@dataclass(slots=True)
class _Case:
    """A variant on its way: the loss, its rollouts, and what came out."""

    label: str
    advantage: str
    loss: PolicyLoss
    groups: list[Group]
    output: dict[str, float] = field(default_factory=dict)
    clipped: float | None = None
    masked: float = 0.0
    gradient: Tensor | None = None
    credit: dict[int, Tensor] = field(default_factory=dict)


def replay(
    run: RunReader,
    step: int,
    losses: Sequence[str | PolicyLoss] = (),
    advantages: Sequence[str] = (),
    *,
    use_weights: bool = True,
) -> Replay:
    """Compute losses and advantages on the recorded rollouts of a step, beside those of the run.

    Args:
        losses: names, or losses. None: the run's own.
        advantages: names of estimators. None: the recorded advantages.
        use_weights: False: take the recorded log-probs even where the weights are there, which needs no model.
    """
    config = TrainConfig.of_run(run.path)
    line = next((line for line in run.metrics() if line.get("step") == step and step > 0), None)
    if line is None:
        raise InputError(f"{run.path} has no step {step}; its completions are of steps {run.completion_steps()}")
    recorded = _recorded(run, step)
    groups = [group for group in recorded if group.status == "kept"]
    expected = int(line.get("dynamic/groups_kept", config.prompts_per_step))
    if len(groups) != expected:
        raise InputError(
            f"the file of step {step} has {len(groups)} of the {expected} groups that were trained on, since "
            f"completions_limit={config.advanced.completions_limit}; a gradient of a part would be another one. Raise "
            "completions_limit in a run to replay"
        )
    cases = _cases(config, line, groups, losses, advantages)
    has_advantage = any(rollout.has_advantage for group in groups for rollout in group.rollouts)
    if not has_advantage and cases[0].loss.is_zero_without_advantage:
        raise InputError(f"no completion of step {step} has an advantage, so there is no gradient; choose another step")
    updates = config.epochs_per_batch * config.minibatches
    notes = []
    if updates > 1:
        notes.append(
            f"step {step} had {updates} updates; replayed is the last, on the groups of its minibatch. The recorded "
            "gradient norm is the mean over all of them"
        )
    weights = _weights(run, config, step) if use_weights else None
    part = (minibatch_parts(groups, config.minibatches) * config.epochs_per_batch)[-1]
    replayed = None
    if weights is None:
        reason = f"weights before step {step} are not used" if not use_weights else _why_not(run, config, step)
        notes.append(f"{reason}: recorded log-probs stand in, and gradients are those of the log-probs")
        for case in cases:
            _from_records(case, config, line, part, is_on_policy=updates == 1)
    else:
        replayed = _with_weights(cases, run, config, step, notes)
    chosen = [rollout for group in groups for rollout in group.rollouts][part]
    statuses = [group.status for group in recorded for _ in group.rollouts]
    rows = [row for row, status in enumerate(statuses) if status == "kept"][part]
    return _result(run, step, cases, chosen, rows, part, line, weights, replayed, updates, notes)


# --- variants ---------------------------------------------------------------------------------------------------------


def _recorded(run: RunReader, step: int) -> list[Group]:
    """The groups of a step; a file of completions that a run did not write is refused."""
    table = run.completions(step)
    try:
        return decode(table)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{run.completions_file(step)} is not as a run writes it: {error}; choose another step"
        ) from error


def _cases(
    config: TrainConfig,
    line: dict[str, Any],
    groups: list[Group],
    losses: Sequence[str | PolicyLoss],
    advantages: Sequence[str],
) -> list[_Case]:
    """The run's own loss with the recorded advantages, then each loss with each advantage."""
    own = _loss(config, config.loss, line)
    cases = [_Case(config.loss, config.advantage, own, groups)]
    estimated = {name: _estimated(config, line, groups, name) for name in advantages}
    for loss in losses or (config.loss,):
        made = loss if isinstance(loss, PolicyLoss) else _loss(config, loss, line)
        label = type(loss).__name__ if isinstance(loss, PolicyLoss) else loss
        for name in advantages or (config.advantage,):
            if (made, name) != (own, config.advantage):
                cases.append(_Case(label, name, made, estimated.get(name, groups)))
    return cases


def _loss(config: TrainConfig, name: str, line: dict[str, Any]) -> PolicyLoss:
    """A loss with the options of the run; those that belong to the run's own loss are left at another's defaults."""
    if name != config.loss:
        defaults = {
            option: TrainConfig.model_fields[option].get_default(call_default_factory=True)
            for option in OPTIONS_OF_A_LOSS
        }
        config = config.model_copy(update={"loss": name, **defaults})
    loss = build.build_loss(config)
    # The bonus that follows a target has another coefficient in every step.
    return (
        loss.replace(entropy_coef=line["policy/entropy_coef"]) if config.advanced.entropy_target is not None else loss
    )


def _estimated(config: TrainConfig, line: dict[str, Any], groups: list[Group], name: str) -> list[Group]:
    """The groups with the advantages of another estimator, from the recorded rewards."""
    if name == config.advantage:
        return groups
    changes = {"advantage": name, "advantage_options": {}, "normalization": None, "scale": None}
    changed = config.model_copy(update=changes)
    estimate = build.build_advantage(changed)
    if "greedy_rewards" in getattr(estimate, "needs", ()):
        raise InputError(
            f"advantage={name!r} compares with a greedy completion, which a run with advantage={config.advantage!r} "
            "did not sample; choose another"
        )
    is_judged = any(rollout.correct is not None for group in groups for rollout in group.rollouts)
    weights, correct_by = {}, "recorded" if is_judged else None
    if getattr(estimate, "per_reward", False):
        names = list(groups[0].rollouts[0].rewards)
        weights, correct_by = {names[0]: 1.0}, names[0]
        if len(names) > 1:
            _, inputs = resolve_inputs(config)
            scorer = build.build_rewards(config, inputs)
            weights, correct_by = {reward.name: reward.weight for reward in scorer.rewards}, scorer.correct_by
    stage = AdvantageAssigner(
        estimate=estimate,
        shape=RewardShape(
            max_length=config.max_new_tokens,
            overlong_cache=config.overlong_cache,
            truncated_factor=config.advanced.truncated_factor,
        ),
        weights=weights,
        correct_by=correct_by,
        mask_truncated=config.mask_truncated,
    )
    return stage.assign(groups, line.get("reward/kl_coef", 0.0))


# --- with weights -----------------------------------------------------------------------------------------------------


def _weights(run: RunReader, config: TrainConfig, step: int) -> str | None:
    """Source of the weights before a step."""
    if config.model.startswith(MARK):
        return None
    if step == 1:
        return f"the base model, {config.pinned_model}"
    return f"checkpoint of step {step - 1}" if step - 1 in run.checkpoint_steps() else None


def _why_not(run: RunReader, config: TrainConfig, step: int) -> str:
    if config.model.startswith(MARK):
        return "the model was a Python object, which the run directory cannot hold"
    steps = [1, *(n + 1 for n in run.checkpoint_steps() if n + 1 in run.completion_steps())]
    return (
        f"there is no checkpoint of step {step - 1}, which has the weights before step {step} (steps with weights: "
        f"{', '.join(map(str, steps))}; save_every and keep_checkpoints decide)"
    )


def _with_weights(cases: list[_Case], run: RunReader, config: TrainConfig, step: int, notes: list[str]) -> float:
    """Take the updates of the step again; in the last, the gradient of each case. Returns the mean gradient norm."""
    own = cases[0]
    if config.threads:
        torch.set_num_threads(config.threads)
    inputs = Inputs(model=config.pinned_model, tokenizer=None, rewards=(), data=None, eval_data=None)
    model = build.build_model(config, inputs, own.loss, load_tokenizer(config.tokenizer_id))
    if any("ref_logps" in case.loss.needs for case in cases):
        model.reference()  # before the weights of the step are loaded: it is the model at the start
    if step > 1:
        state = build.build_state(config, model, num_prompts=0)
        Snapshots(Checkpoints(run.path / "checkpoints", keep=config.keep_checkpoints), model, state).load_step(step - 1)
    model.measures_gap, model.metrics = False, []
    parts = minibatch_parts(own.groups, config.minibatches) * config.epochs_per_batch
    rollouts = [_as_sampled(rollout) for group in own.groups for rollout in group.rollouts]
    if len(parts) > 1:
        rollouts = Learner(model=model).with_logps(rollouts)
    version, norms = model.version, []
    for number, part in enumerate(parts, 1):
        chosen = rollouts[part]
        if model.version == version:
            chosen = [replace(rollout, old_logps=None) for rollout in chosen]
        if number == len(parts):
            seen: dict[int, Tensor] = {}
            for case in reversed(cases):  # the run's own last: its gradient is the one that is left
                given = [rollout.advantage for group in case.groups for rollout in group.rollouts][part]
                masks = [rollout.is_masked for group in case.groups for rollout in group.rollouts][part]
                seen = _gradient(case, model, [
                    replace(rollout, advantage=advantage, is_masked=is_masked)
                    for rollout, advantage, is_masked in zip(chosen, given, masks, strict=True)
                ])  # fmt: skip
            notes.append(_agreement(seen, own.groups, part))
        else:
            model.run(model.plan(chosen))
        report = model.clip_grad_and_step(config.max_grad_norm)
        norms += [] if report.grad_norm is None or not math.isfinite(report.grad_norm) else [report.grad_norm]
    return sum(norms) / max(len(norms), 1)


def _as_sampled(rollout: Rollout) -> Rollout:
    """A rollout as the sampler left it, with its advantage; the trainer's log-probs are recomputed."""
    return replace(rollout, old_logps=None, ref_logps=None, policy_logps=None, entropies=None)


def _gradient(case: _Case, model: "TransformersModel", rollouts: list[Rollout]) -> dict[int, Tensor]:
    """Fill in a case; returns the log-probs of each rollout that was scored."""
    seen: dict[int, Tensor] = {}
    live = rejected = 0
    metric = metric_for(case.loss)

    def watch(batch: PackedBatch, inputs: LossInputs) -> None:
        nonlocal live, rejected
        metric.add(replace(inputs, on_policy=False))
        for values, kept in ((inputs.logps.detach(), seen), (_credit(case.loss, inputs), case.credit)):
            kept.update(zip(batch.indices, values.cpu().split(batch.lengths), strict=True))
        live += int((inputs.advantages != 0).sum())
        rejected += int(case.loss.rejected_tokens(inputs).sum())

    model.weights.zero_grad()
    model.set_loss(case.loss)
    output = model.run(model.plan(rollouts), watch)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.weights.parameters]
    case.gradient = torch.cat([gradient.detach().float().cpu().flatten() for gradient in gradients])
    case.output = {name: float(value) for name, value in ({"loss": output.loss} | output.terms).items()}
    case.clipped = metric.calculate().get("train/clip_ratio")
    case.masked = rejected / live if live else 0.0
    return seen


def _credit(loss: PolicyLoss, inputs: LossInputs) -> Tensor:
    """d loss / d logp of each token, with entropies held fixed."""
    logps = inputs.logps.detach().requires_grad_()
    entropies = None if inputs.entropies is None else inputs.entropies.detach()
    old = logps.detach() if inputs.on_policy else inputs.old_logps
    output = loss.compute(replace(inputs, logps=logps, old_logps=old, entropies=entropies))
    (gradient,) = torch.autograd.grad(output.loss, [logps], allow_unused=True)
    return torch.zeros_like(logps) if gradient is None else gradient


def _agreement(seen: dict[int, Tensor], groups: list[Group], part: slice) -> str:
    """Distance of the log-probs from the recorded ones, which shows different weights, devices and versions."""
    recorded = [rollout.policy_logps for group in groups for rollout in group.rollouts][part]
    gaps = [
        float((logps.double() - torch.tensor(recorded[i], dtype=torch.float64)).abs().max())
        for i, logps in seen.items()
        if recorded[i] and len(logps)
    ]
    return f"log-probs are the recorded ones to {max(gaps, default=0.0):.1g}"


# --- without weights --------------------------------------------------------------------------------------------------


def _from_records(case: _Case, config: TrainConfig, line: dict[str, Any], part: slice, *, is_on_policy: bool) -> None:
    """Fill in a case from recorded log-probs; its gradient is that of the log-probs."""
    chosen = [rollout for group in case.groups for rollout in group.rollouts][part]
    is_exact = is_on_policy and config.sampler == "torch" and not config.max_staleness
    live = [
        i for i, r in enumerate(chosen) if r.num_scored and (r.has_advantage or not case.loss.is_zero_without_advantage)
    ]
    logps = [chosen[i].policy_logps or (chosen[i].trajectory.logps if is_exact else None) for i in live]
    old = [None if is_on_policy else chosen[i].old_logps for i in live]
    needed = {"log-probs": logps} | ({} if is_on_policy else {"old_logps": old})
    if "ref_logps" in case.loss.needs:
        needed["ref_logps"] = [chosen[i].ref_logps for i in live]
    for name, rows in needed.items():
        if any(row is None for row in rows):
            raise InputError(
                f"{case.label} with {case.advantage} trains on completions whose {name} the run did not record, since "
                "it did not train on them itself; replay a step whose weights are there: that after a checkpoint, or 1"
            )
    if not live:
        raise InputError(f"{case.label} with {case.advantage} gives no completion of the step an advantage")
    members = [replace(chosen[i], old_logps=old[k]) for k, i in enumerate(live)]
    if "ref_logps" not in case.loss.needs:
        members = [replace(member, ref_logps=None) for member in members]
    batch = pack(members)
    if case.loss.draws_tokens:
        batch = replace(batch, sequence_ids=torch.tensor(live))
    flat = torch.tensor([value for row in logps if row for value in row])
    entropies = [chosen[i].entropies for i in live]
    flat_entropies = None
    if all(row is not None for row in entropies):
        flat_entropies = torch.tensor([value for row in entropies if row for value in row])
    inputs = LossInputs.of(batch, flat, flat_entropies, Totals.of_step(chosen, _version(config, line)))
    inputs = case.loss.surveyed(inputs)
    output = case.loss.compute(inputs)
    credit = _credit(case.loss, inputs)
    case.credit = dict(zip(live, credit.split(batch.lengths), strict=True))
    case.output = {name: float(value) for name, value in ({"loss": output.loss} | output.terms).items()}
    metric = metric_for(case.loss)
    metric.add(replace(inputs, on_policy=False))
    case.clipped = metric.calculate().get("train/clip_ratio")
    tokens = int((inputs.advantages != 0).sum())
    case.masked = int(case.loss.rejected_tokens(inputs).sum()) / tokens if tokens else 0.0


def _version(config: TrainConfig, line: dict[str, Any]) -> int:
    """Updates before the last one of a step, where none was skipped."""
    return line["step"] * config.epochs_per_batch * config.minibatches - 1


# --- result -----------------------------------------------------------------------------------------------------------


def _result(
    run: RunReader,
    step: int,
    cases: list[_Case],
    chosen: list[Rollout],
    rows: list[int],
    part: slice,
    line: dict[str, Any],
    weights: str | None,
    replayed: float | None,
    updates: int,
    notes: list[str],
) -> Replay:
    lengths = [rollout.trajectory.num_sampled for rollout in chosen]
    credits = [_whole(case.credit, lengths) for case in cases]
    gradients = [
        credit if case.gradient is None else case.gradient for case, credit in zip(cases, credits, strict=True)
    ]
    variants = []
    for case, credit, gradient in zip(cases, credits, gradients, strict=True):
        first = credits[0]
        given = [rollout.advantage for group in case.groups for rollout in group.rollouts][part]
        variants.append(
            Variant(
                loss=case.label,
                advantage=case.advantage,
                value=case.output.pop("loss"),
                terms=case.output,
                grad_norm=float(gradient.double().norm()),
                clipped=case.clipped,
                masked=case.masked,
                moved=float((_shares(credit) - _shares(first)).abs().sum() / 2),
                lost=int(((credit == 0) & (first != 0)).sum()),
                gained=int(((credit != 0) & (first == 0)).sum()),
                flipped=int((credit * first < 0).sum()),
                advantages=[list(a) if isinstance(a, tuple) else a for a in given],
                credit=[row.tolist() for row in credit.split(lengths)],
            )
        )
    places = [(group.prompt.index, sample) for group in cases[0].groups for sample, _ in enumerate(group.rollouts)][
        part
    ]
    return Replay(
        run=str(run.path),
        step=step,
        update=updates,
        weights=weights,
        recorded_norm=line.get("optim/grad_norm"),
        replayed_norm=replayed,
        variants=variants,
        cosine=[[_cosine(a, b) for b in gradients] for a in gradients],
        rollouts=places,
        rows=rows,
        sampled=[list(r.trajectory.sampled or (True,) * len(r.trajectory.tokens)) for r in chosen],
        notes=notes,
    )


def _whole(credit: dict[int, Tensor], lengths: Sequence[int]) -> Tensor:
    """The credit of all sampled tokens, 0 for rollouts that are not trained on."""
    rows = [credit[i] if len(credit.get(i, ())) else torch.zeros(n) for i, n in enumerate(lengths)]
    return torch.cat([row.float() for row in rows]) if rows else torch.zeros(0)


def _shares(credit: Tensor) -> Tensor:
    total = credit.double().abs().sum()
    return credit.double() / (total if total else 1)


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.double().norm() * b.double().norm())
    return float(a.double() @ b.double()) / norms if norms else 0.0
