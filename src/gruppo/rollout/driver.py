"""Driver: completions of prompts with their rewards. The only caller of the sampler and of the reward functions."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gruppo import faults
from gruppo.reward import RewardResult, RewardScorer
from gruppo.sampler.base import Sampler, Samples, SamplingParams
from gruppo.turns.environment import ENVIRONMENT_REWARD
from gruppo.turns.player import Player
from gruppo.types import ENVIRONMENT, Group, Prompt, Rollout, Trajectory


@dataclass(slots=True)
class Stopwatch:
    """Seconds of each stage of a step, and the stage that runs now."""

    step: Callable[[], int] = lambda: 0
    """Steps that are complete."""
    prefix: str = ""
    """Before the name of each stage."""
    stage: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.stage, started = stage, time.monotonic()
        try:
            faults.reach(stage, self.step())
            yield
        finally:
            name = self.prefix + stage
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def take(self) -> dict[str, float]:
        """The seconds so far; it counts from 0 again."""
        seconds, self.seconds = self.seconds, {}
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Plays prompts with a sampler, and scores what comes of them."""

    sampler: Sampler
    scorer: RewardScorer | None
    """None: completions get no rewards."""
    player: Player | None = None
    """Plays the episodes of a run with turns; None: a completion is one turn."""
    watch: Stopwatch = field(default_factory=Stopwatch)

    def play(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, *, step: int
    ) -> tuple[list[Group], RewardResult]:
        """A group of scored completions for each prompt, and what the reward functions gave.

        Args:
            step: steps that are complete, for reward functions.
        """
        if self.player is not None:
            samples = self.player.play(self.sampler, prompts, num_samples, params, self.watch)
        else:
            with self.watch("sample"):
                samples = self.sampler.draw(prompts, num_samples, params)
        return self.score(prompts, samples, step=step, seed=params.seed)

    def submit(self, prompt: Prompt, num_samples: int, params: SamplingParams) -> list[Future[Samples]]:
        """Start the completions of a prompt; `score` takes what the futures give."""
        with self.watch("sample"):
            return self.sampler.submit(self.sampler.requests([prompt], num_samples, params), params)

    def score(
        self, prompts: Sequence[Prompt], samples: Sequence[Samples], *, step: int, seed: int
    ) -> tuple[list[Group], RewardResult]:
        """The completions of each prompt as a group of scored rollouts, and what the reward functions gave."""
        if self.scorer is None:
            groups = [
                Group(prompt=p, rollouts=tuple(Rollout(trajectory=t) for t in drawn))
                for p, drawn in zip(prompts, samples, strict=True)
            ]
            return groups, RewardResult(totals=[], values={}, correct=[], metrics={})
        drawn = [(i, t) for i, trajectories in enumerate(samples) for t in trajectories]
        played = [(i, t) for i, t in drawn if not t.is_lost]
        # An environment may have given the prompt; a sampler's own note of it need not be whole.
        owners = [prompts[i] if self.player is None else t.prompt for i, t in played]
        names = sorted({name for prompt in prompts for name in prompt.columns})
        columns: dict[str, list[Any]] = {name: [prompt.columns.get(name) for prompt in owners] for name in names}
        if self.player is not None:
            columns[ENVIRONMENT_REWARD] = [t.env_reward for _, t in played]
        with self.watch("reward"):
            result = self.scorer.score(
                [prompt.source for prompt in owners],
                [t.text for _, t in played],
                completion_ids=[t.sampled_tokens for _, t in played],
                prompt_texts=[prompt.text for prompt in owners],
                columns=columns,
                step=step,
                rng_seed=seed,
                group_ids=[i for i, _ in played],
                messages=None if self.player is None else [t.messages for _, t in played],
            )
        places = iter(range(len(played)))
        rollouts = iter([
            _lost(t, result) if t.is_lost else _scored(t, result, next(places)) for _, t in drawn
        ])  # fmt: skip
        groups = [
            Group(prompt=prompt, rollouts=tuple(next(rollouts) for _ in drawn))
            for prompt, drawn in zip(prompts, samples, strict=True)
        ]
        return groups, result


def _scored(trajectory: Trajectory, result: RewardResult, i: int) -> Rollout:
    """A trajectory with the values of place `i` of what the reward functions gave."""
    return Rollout(
        trajectory=trajectory,
        reward=result.totals[i],
        rewards={name: values[i] for name, values in result.values.items()},
        correct=result.correct[i],
        extras={name: values[i] for name, values in result.extras.items()},
        errors={name: reasons[i] for name, reasons in result.failures.items() if i in reasons},
    )


def _lost(trajectory: Trajectory, result: RewardResult) -> Rollout:
    """An episode whose environment failed: nobody can say what it earned."""
    rewards = dict.fromkeys(result.values)
    return Rollout(trajectory=trajectory, rewards=rewards, errors={ENVIRONMENT: trajectory.error})


def greedy(params: SamplingParams) -> SamplingParams:
    """The same limits, and always the likeliest token."""
    return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
