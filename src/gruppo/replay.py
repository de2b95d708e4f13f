"""Replay of a step: other losses and advantages on the rollouts that a run has recorded.

With the weights that the run had before the step (a checkpoint, or the base model for step 1) the updates of the step
are taken again, and the gradients of all losses are compared in its last one. The run's own loss gives the recorded
gradient norm. Without those weights the recorded log-probs stand in: gradients are then those of the log-probs,
d loss / d logp, which is each token's credit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppo.batch import Totals, pack
from gruppo.codec import decode
from gruppo.errors import InputError
from gruppo.loss import LossOutput, PolicyLoss
from gruppo.loss.inputs import LossInputs
from gruppo.metric import metric_for
from gruppo.run.checkpoints import Checkpoints
from gruppo.run.reader import RunReader
from gruppo.trainer import build
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
    advantages: list[float | list[float]]
    """Of each rollout: one number, or one per sampled token."""
    credit: list[list[float]]
    """d loss / d logp of each sampled token of each rollout; a negative one makes the token likelier."""
    gradient: Tensor | None = field(default=None, repr=False, compare=False)
    """Of the weights, flat; without weights of the log-probs."""
    moved: float = 0.0
    """Share of the credit that is on other tokens than with the first variant, or has the other sign there."""
    lost: int = 0
    """Tokens that have credit with the first variant and none with this one."""
    gained: int = 0
    """Tokens that have credit with this one alone."""
    flipped: int = 0
    """Tokens whose credit has the other sign."""

    @property
    def name(self) -> str:
        return f"{self.loss} + {self.advantage}"

    def against(self, first: "Variant") -> "Variant":
        """The same, compared with the first one."""
        own, other = (torch.tensor([value for row in v.credit for value in row]) for v in (self, first))
        return replace(
            self,
            moved=float((_shares(own) - _shares(other)).abs().sum() / 2),
            lost=int(((own == 0) & (other != 0)).sum()),
            gained=int(((own != 0) & (other == 0)).sum()),
            flipped=int((own * other < 0).sum()),
        )


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
        shown = [f.name for f in fields(Variant) if f.name not in ("advantages", "credit", "gradient")]
        variants = [{name: getattr(variant, name) for name in ("name", *shown)} for variant in self.variants]
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


@dataclass(frozen=True, slots=True)
class _Case:
    """A loss with an advantage, and the rollouts of the update with it."""

    label: str
    advantage: str
    loss: PolicyLoss
    rollouts: list[Rollout]


class _Seen:
    """What a case makes of the tokens of an update, micro-batch by micro-batch."""

    def __init__(self, case: _Case) -> None:
        self.case, self.metric = case, metric_for(case.loss)
        self.logps: dict[int, Tensor] = {}
        self.credit: dict[int, Tensor] = {}
        self._live = self._rejected = 0

    def add(self, indices: Sequence[int], lengths: Sequence[int], inputs: LossInputs) -> None:
        self.metric.add(replace(inputs, on_policy=False))
        loss = self.case.loss
        for values, kept in ((inputs.logps.detach(), self.logps), (_credit(loss, inputs), self.credit)):
            kept.update(zip(indices, values.cpu().split(lengths), strict=True))
        self._live += int((inputs.advantages != 0).sum())
        self._rejected += int(loss.rejected_tokens(inputs).sum())

    def variant(self, output: LossOutput, gradient: Tensor | None = None) -> Variant:
        """The variant; without a gradient of the weights its gradient is the credit."""
        lengths = [rollout.trajectory.num_sampled for rollout in self.case.rollouts]
        given = [self.credit.get(i, torch.zeros(0)) for i in range(len(lengths))]
        credit = [row.float() if len(row) else torch.zeros(n) for row, n in zip(given, lengths, strict=True)]
        gradient = torch.cat(credit) if gradient is None else gradient
        advantages = [rollout.advantage for rollout in self.case.rollouts]
        return Variant(
            loss=self.case.label,
            advantage=self.case.advantage,
            value=float(output.loss),
            terms={name: float(value) for name, value in output.terms.items()},
            grad_norm=float(gradient.double().norm()),
            clipped=self.metric.calculate().get("train/clip_ratio"),
            masked=self._rejected / self._live if self._live else 0.0,
            advantages=[list(a) if isinstance(a, tuple) else a for a in advantages],
            credit=[row.tolist() for row in credit],
            gradient=gradient,
        )


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
    part = (minibatch_parts(groups, config.minibatches) * config.epochs_per_batch)[-1]
    cases = _cases(config, line, groups, part, losses, advantages)
    if not any(rollout.has_advantage for rollout in _flat(groups)) and cases[0].loss.is_zero_without_advantage:
        raise InputError(f"no completion of step {step} has an advantage, so there is no gradient; choose another step")
    updates = config.epochs_per_batch * config.minibatches
    notes = []
    if updates > 1:
        notes.append(
            f"step {step} had {updates} updates; replayed is the last, on the groups of its minibatch. The recorded "
            "gradient norm is the mean over all of them"
        )
    weights = _weights(run, config, step) if use_weights else None
    replayed = None
    if weights is None:
        reason = f"weights before step {step} are not used" if not use_weights else _why_not(run, config, step)
        notes.append(f"{reason}: recorded log-probs stand in, and gradients are those of the log-probs")
        variants = [_from_records(case, config, line, is_on_policy=updates == 1) for case in cases]
    else:
        variants, replayed = _with_weights(cases, groups, run, config, step, notes)
    places = [(group, sample) for group in recorded for sample in range(len(group.rollouts))]
    kept = [(row, group.prompt.index, i) for row, (group, i) in enumerate(places) if group.status == "kept"][part]
    trajectories = [rollout.trajectory for rollout in cases[0].rollouts]
    return Replay(
        run=str(run.path),
        step=step,
        update=updates,
        weights=weights,
        recorded_norm=line.get("optim/grad_norm"),
        replayed_norm=replayed,
        variants=[variant.against(variants[0]) for variant in variants],
        cosine=[[_cosine(a, b) for b in variants] for a in variants],
        rollouts=[(index, sample) for _, index, sample in kept],
        rows=[row for row, _, _ in kept],
        sampled=[list(t.sampled or (True,) * len(t.tokens)) for t in trajectories],
        notes=notes,
    )


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
    part: slice,
    losses: Sequence[str | PolicyLoss],
    advantages: Sequence[str],
) -> list[_Case]:
    """The run's own loss with the recorded advantages, then each loss with each advantage."""
    own = _loss(config, config.loss, line)
    recorded = _flat(groups)[part]
    cases = [_Case(config.loss, config.advantage, own, recorded)]
    estimated = {name: _flat(_estimated(config, line, groups, name))[part] for name in advantages}
    for loss in losses or (config.loss,):
        made = loss if isinstance(loss, PolicyLoss) else _loss(config, loss, line)
        label = type(loss).__name__ if isinstance(loss, PolicyLoss) else loss
        for name in advantages or (config.advantage,):
            if (made, name) != (own, config.advantage):
                cases.append(_Case(label, name, made, estimated.get(name, recorded)))
    return cases


def _flat(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


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
    is_judged = any(rollout.correct is not None for rollout in _flat(groups))
    weights, correct_by = {}, "recorded" if is_judged else None
    if getattr(estimate, "per_reward", False):
        names = list(groups[0].rollouts[0].rewards)
        weights, correct_by = {names[0]: 1.0}, names[0]
        if len(names) > 1:
            _, inputs = resolve_inputs(config)
            scorer = build.build_rewards(config, inputs)
            weights, correct_by = {reward.name: reward.weight for reward in scorer.rewards}, scorer.correct_by
    return build.assigner_of(changed, estimate, weights, correct_by).assign(groups, line.get("reward/kl_coef", 0.0))


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


def _with_weights(
    cases: list[_Case], groups: list[Group], run: RunReader, config: TrainConfig, step: int, notes: list[str]
) -> tuple[list[Variant], float]:
    """Take the updates of the step again; in the last, the gradient of each case. And the mean gradient norm."""
    if config.threads:
        torch.set_num_threads(config.threads)
    inputs = Inputs(model=config.pinned_model, tokenizer=None, rewards=(), data=None, eval_data=None)
    model = build.build_model(config, inputs, cases[0].loss, load_tokenizer(config.tokenizer_id))
    if any("ref_logps" in case.loss.needs for case in cases):
        model.reference()  # before the weights of the step are loaded: it is the model at the start
    if step > 1:
        state = build.build_state(config, model, num_prompts=0)
        Snapshots(Checkpoints(run.path / "checkpoints", keep=config.keep_checkpoints), model, state).load_step(step - 1)
    model.measures_gap, model.metrics = False, []
    parts = minibatch_parts(groups, config.minibatches) * config.epochs_per_batch
    rollouts = [_as_sampled(rollout) for rollout in _flat(groups)]
    if len(parts) > 1:
        rollouts = Learner(model=model).with_logps(rollouts)
    version = model.version
    variants: list[Variant] = []
    norms: list[float] = []
    for number, part in enumerate(parts, 1):
        chosen = rollouts[part]
        if model.version == version:
            chosen = [replace(rollout, old_logps=None) for rollout in chosen]
        if number == len(parts):
            seen = [_Seen(case) for case in cases]
            # The run's own last: its gradient is the one that is left.
            variants = [_gradient(each, model, chosen) for each in reversed(seen)][::-1]
            notes.append(_agreement(seen[0].logps, cases[0].rollouts))
        else:
            model.run(model.plan(chosen))
        report = model.clip_grad_and_step(config.max_grad_norm)
        norms += [] if report.grad_norm is None or not math.isfinite(report.grad_norm) else [report.grad_norm]
    return variants, sum(norms) / max(len(norms), 1)


def _as_sampled(rollout: Rollout) -> Rollout:
    """A rollout as the sampler left it, with its advantage; the trainer's log-probs are recomputed."""
    return replace(rollout, old_logps=None, ref_logps=None, policy_logps=None, entropies=None)


def _gradient(seen: _Seen, model: "TransformersModel", rollouts: list[Rollout]) -> Variant:
    """The variant of a case by a step over the rollouts, with its own advantages."""
    case = seen.case
    model.weights.zero_grad()
    model.set_loss(case.loss)
    given = [
        replace(rollout, advantage=own.advantage, is_masked=own.is_masked)
        for rollout, own in zip(rollouts, case.rollouts, strict=True)
    ]
    output = model.run(model.plan(given), lambda batch, inputs: seen.add(batch.indices, batch.lengths, inputs))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.weights.parameters]
    return seen.variant(output, torch.cat([gradient.detach().float().cpu().flatten() for gradient in gradients]))


def _credit(loss: PolicyLoss, inputs: LossInputs) -> Tensor:
    """d loss / d logp of each token, with entropies held fixed."""
    logps = inputs.logps.detach().requires_grad_()
    entropies = None if inputs.entropies is None else inputs.entropies.detach()
    old = logps.detach() if inputs.on_policy else inputs.old_logps
    output = loss.compute(replace(inputs, logps=logps, old_logps=old, entropies=entropies))
    (gradient,) = torch.autograd.grad(output.loss, [logps], allow_unused=True)
    return torch.zeros_like(logps) if gradient is None else gradient


def _agreement(seen: dict[int, Tensor], rollouts: list[Rollout]) -> str:
    """Distance of the log-probs from the recorded ones, which shows different weights, devices and versions."""
    recorded = [rollout.policy_logps for rollout in rollouts]
    gaps = [
        float((logps.double() - torch.tensor(recorded[i], dtype=torch.float64)).abs().max())
        for i, logps in seen.items()
        if recorded[i] and len(logps)
    ]
    return f"log-probs are the recorded ones to {max(gaps, default=0.0):.1g}"


# --- without weights --------------------------------------------------------------------------------------------------


def _from_records(case: _Case, config: TrainConfig, line: dict[str, Any], *, is_on_policy: bool) -> Variant:
    """The variant of a case by recorded log-probs; its gradient is that of the log-probs."""
    chosen = case.rollouts
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
    seen = _Seen(case)
    seen.add(live, batch.lengths, inputs)
    return seen.variant(case.loss.compute(inputs))


def _version(config: TrainConfig, line: dict[str, Any]) -> int:
    """Updates before the last one of a step, where none was skipped."""
    return line["step"] * config.epochs_per_batch * config.minibatches - 1


# --- comparison -------------------------------------------------------------------------------------------------------


def _shares(credit: Tensor) -> Tensor:
    total = credit.double().abs().sum()
    return credit.double() / (total if total else 1)


def _cosine(a: Variant, b: Variant) -> float:
    assert a.gradient is not None and b.gradient is not None
    one, other = a.gradient.double(), b.gradient.double()
    norms = float(one.norm() * other.norm())
    return float(one @ other) / norms if norms else 0.0
