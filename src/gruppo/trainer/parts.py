"""Assembly of a run: `assemble` makes its parts in the order in which they need each other, for `GRPOTrainer`.

Cheap checks come before the model is loaded. A run that cannot begin closes what it opened and leaves nothing behind.
"""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gruppo import doctor
from gruppo.parallel.ranks import Ranks
from gruppo.reward import RewardScorer
from gruppo.rollout.driver import Driver, Stopwatch
from gruppo.rollout.handover import HandOver
from gruppo.rollout.schedule import Schedule, StopHook
from gruppo.rollout.source import RolloutSource
from gruppo.run.checkpoints import Checkpoints
from gruppo.run.directory import RunDirectory
from gruppo.run.recorder import Recorder
from gruppo.run.signals import StopFlag
from gruppo.run.trackers import Trackers, check_installed
from gruppo.trainer import build, resume
from gruppo.trainer.advantages import AdvantageAssigner
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.disk import disk_needs
from gruppo.trainer.inputs import Inputs
from gruppo.trainer.learner import Learner
from gruppo.trainer.state import Position, RunState, Snapshots
from gruppo.weights.source import load_tokenizer

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a run is made of."""

    config: TrainConfig
    """With the numbers that data and model decide: steps, token limit."""
    prompts: build.Prompts
    scorer: RewardScorer
    run: RunDirectory
    model: "Actor"
    state: RunState
    snapshots: Snapshots
    place: Position
    """The step that the run begins after, and what its checkpoint says of the loop."""
    weights: HandOver
    advantages: AdvantageAssigner
    schedule: Schedule
    learner: Learner
    recorder: Recorder
    opened: ExitStack
    """Closes what was opened, in reverse order."""


def assemble(
    config: TrainConfig,
    inputs: Inputs,
    *,
    stop: StopFlag,
    watch: Stopwatch,
    resumes: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    ranks: Ranks | None = None,
) -> Parts:
    """The parts of a run; its arguments are those of `GRPOTrainer`."""
    build.check_ranks(config, inputs, ranks)
    config = build.fit_context(config, inputs)
    if config.threads:
        torch.set_num_threads(config.threads)
    check_installed(config.trackers)
    hook = StopHook(stop.poll)
    poll = hook if config.max_staleness else stop.poll
    loss, estimate, scorer = build.all_of(
        partial(build.build_loss, config, inputs.loss),
        partial(build.build_advantage, config, inputs.advantage),
        partial(build.build_rewards, config, inputs, poll=poll),
    )
    with ExitStack() as stack:
        stack.enter_context(scorer)
        advantages = build.build_assigner(config, estimate, scorer)
        tokenizer = inputs.tokenizer or load_tokenizer(config.tokenizer_id)
        config, prompts = build.count_steps(config, build.build_prompts(config, inputs, tokenizer))
        scorer.max_steps = config.steps
        scorer.steps_per_epoch = len(prompts.train) / config.prompts_per_step
        build.try_rewards(scorer, prompts.train.prompts, has_turns=config.has_turns)
        player = build.build_player(config, inputs.environments, inputs.model, tokenizer, poll)
        if player is not None:
            stack.enter_context(closing(player))
        if resumes:
            run = RunDirectory.reopen(config.output)
        else:
            run = RunDirectory.create(config.output, config=config.to_yaml(), overwrite=overwrite)
        stack.enter_context(run)
        stop.parting = lambda: f"left at once; {run.saved()}"
        made_from = resume.options_of(config) | build.build_digests(inputs, prompts)
        changes = resume.check_origin(run, made_from, accept=accept_changes) if resumes else []
        scorer.start()

        if ranks is None:
            model = build.build_model(config, inputs, loss, tokenizer)
        else:
            ranks.broadcast({"call": "begin", "config": config.model_dump(mode="json", exclude_unset=True)})
            model = build.build_ranked(config, inputs, loss, tokenizer, ranks, stop.share)
        state = build.build_state(config, model, len(prompts.train))
        snapshots = Snapshots(Checkpoints(run.checkpoints, keep=config.keep_checkpoints), model, state)
        place = Position()
        if resumes:
            place = resume.go_on(run, config, model, snapshots, changes)
        else:
            disk_needs(config, model).check(config, run.path)
        if changes or not (run.path / "origin.json").exists():
            run.write_origin(made_from)
        if changes or not run.held_out.exists():
            run.write_held_out(prompts.held_out.prompts)

        folder = (run.path / "sync").resolve()  # a server reads it from another working directory
        weights = build.build_hand_over(config, model, prompts, folder, poll)
        stack.enter_context(closing(weights))
        model.measures_gap = not weights.sampler.is_exact or loss.reads_sampler or config.max_staleness > 0
        source = RolloutSource(
            prompts=prompts.train.prompts,
            driver=Driver(sampler=weights.sampler, scorer=scorer, player=player, watch=watch),
            solved=state.solved,
            params=build.sampling_params(config),
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            max_batches=config.dynamic_sampling,
            shuffled=config.shuffle,
            has_signal=advantages.has_signal,
            needs_greedy="greedy_rewards" in getattr(estimate, "needs", ()),
        )
        schedule = state.schedule = hook.schedule = build.build_schedule(
            config, source, weights, stop.poll, run.log_event
        )
        stack.enter_context(closing(schedule))  # before the sampler and the rewards end
        if place.folder is not None:
            schedule.load(place.folder)
        # Last: a board leaves files behind, and a run that cannot begin must not.
        recorder = _recorder(config, run, scorer, watch, quiet=quiet)
        stack.enter_context(closing(recorder))
        return Parts(
            config=config,
            prompts=prompts,
            scorer=scorer,
            run=run,
            model=model,
            state=state,
            snapshots=snapshots,
            place=place,
            weights=weights,
            advantages=advantages,
            schedule=schedule,
            learner=Learner(
                model=model,
                epochs=config.epochs_per_batch,
                minibatches=config.minibatches,
                max_grad_norm=config.max_grad_norm,
            ),
            recorder=recorder,
            opened=stack.pop_all(),
        )


def _recorder(
    config: TrainConfig, run: RunDirectory, scorer: RewardScorer, watch: Stopwatch, *, quiet: bool
) -> Recorder:
    options: dict[str, Any] = config.model_dump(mode="json")
    return Recorder(
        run,
        Trackers(config.trackers, run.path, options, deadline_s=config.advanced.tracker_deadline),
        steps=config.steps,
        completions_every=config.completions_every,
        completions_limit=config.advanced.completions_limit,
        quiet=quiet,
        advise=partial(doctor.advice, config=options, **scorer.facts),
        stage=lambda: watch.stage,
    )
