"""Player: plays episodes in rounds. All that go on sample their next turn together, then their environments answer.

What was sampled is kept as token ids and log-probs and never tokenised again; an answer becomes token ids once, by
`chat.py`. A batch depends on the seeds and the answers alone, so a run repeats to the bit if its environments do.

A failing environment costs its episode and never the step: the episode is lost, has no reward and is not trained on.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from gruppo.errors import GruppoError, InputError, RewardError
from gruppo.random import row_keys
from gruppo.reward.call import short_traceback
from gruppo.sampler.base import Poll, Sampler, SampleRequest, Samples, SamplingParams
from gruppo.task.prompts import conversation
from gruppo.turns.ask import CallExecutor, ask
from gruppo.turns.chat import ChatCodec
from gruppo.turns.environment import Answer, Environment, Environments
from gruppo.types import LOST, Message, Prompt, StopReason, Trajectory

WAIT = 0.2
"""Seconds between two looks at the stop flag while environments are awaited."""
GRACE = 1.0
"""Seconds after a deadline at which an event loop that has not seen it counts as blocked."""
MAX_LOST_OF_STEP, MAX_LOST_OF_RUN = 0.5, 0.2
"""Shares of lost episodes above which the run ends."""
MAX_TOKEN_CHARS = 128
"""A prompt of more characters for each token of the context is not tokenised: that could take all of the memory."""
LATE = object()
"""In the place of an answer that did not come in time."""
FREE_LOSSES = 16
"""Fewer lost episodes than this are tolerated whatever their share, unless all of a first step are lost."""


Question = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """How long an episode may get."""

    max_turns: int = 10
    """Turns of the policy."""
    max_turn_tokens: int | None = None
    """Tokens of one turn; None: as many as the completion has left."""
    max_context: int | None = None
    """Tokens of prompt, turns and answers; None: no limit."""
    turn_deadline: float = 30.0
    """Seconds that an environment may take for one answer."""
    episode_deadline: float = 600.0
    """Seconds that it may take for all answers of an episode."""


@dataclass(slots=True, eq=False)
class Episode:
    """An episode while it is played."""

    request: SampleRequest
    sample: int
    prompt: Prompt
    key: str
    """Name of its environment."""
    env: Environment | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    entropies: list[float] | None = None
    versions: tuple[int, int] | None = None
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    """None: it goes on."""
    error: str = ""
    seconds: float = 0.0
    """Time that its environment has taken."""

    @property
    def is_lost(self) -> bool:
        return self.stop_reason in LOST

    def limit(self, params: SamplingParams, limits: TurnLimits, given: int = 0) -> tuple[int, StopReason]:
        """Tokens that the next turn may have, after so many given ones, and what it is if that is too few."""
        budget = params.max_new_tokens - sum(self.sampled)
        room = budget if limits.max_turn_tokens is None else min(budget, limits.max_turn_tokens)
        if limits.max_context is not None:
            left = limits.max_context - len(self.prompt.token_ids) - len(self.tokens) - given
            if left < room:
                return left, "context"
        return room, "length"

    def add_turn(self, turn: Trajectory, message: Message) -> None:
        """Append what the policy has sampled."""
        if turn.logps is None:
            raise InputError("this sampler reports no log-probs of sampled tokens, which episodes are trained with")
        if not self.tokens:
            self.entropies = None if turn.entropies is None else []
        self.tokens += turn.tokens
        self.sampled += [True] * len(turn.tokens)
        self.logps += turn.logps
        if self.entropies is not None:
            self.entropies += turn.entropies or ()
        oldest, newest = self.versions or turn.versions
        self.versions = min(oldest, turn.versions[0]), max(newest, turn.versions[1])
        self.messages.append(message)

    def trajectory(self) -> Trajectory:
        """The episode as one sequence."""
        said = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return Trajectory(
            prompt=self.prompt,
            tokens=tuple(self.tokens),
            sampled=tuple(self.sampled),
            logps=tuple(self.logps),
            entropies=None if self.entropies is None else tuple(self.entropies),
            versions=self.versions or (0, 0),
            text=said[-1] if said else "",
            stop_reason=self.stop_reason or "stop",
            messages=tuple(self.messages),
            env_reward=None if self.is_lost or not self.rewards else sum(self.rewards),
            error=self.error,
        )


class Player:
    """Plays the episodes of a run.

    Args:
        codecs: how the conversations of each environment become tokens, by its name.
        system: a system message for prompts of environments that have none.
        poll: cancellation hook, called while environments are awaited; raises to stop.
    """

    def __init__(
        self,
        environments: Environments,
        codecs: Mapping[str, ChatCodec],
        limits: TurnLimits | None = None,
        *,
        system: str | None = None,
        poll: Poll = lambda: None,
    ) -> None:
        self.environments, self.codecs = environments, codecs
        self.limits, self.system, self.poll = limits or TurnLimits(), system, poll
        self._idle: dict[str, list[Environment]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_left = threading.Event()
        self._played = self._lost = 0

    def play(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        watch: Callable[[str], AbstractContextManager[None]],
    ) -> list[Samples]:
        """The episodes of each prompt, each one trajectory.

        Args:
            watch: times the stages "sample" and "env".
        """
        groups = [
            [
                Episode(request=r, sample=r.first + i, prompt=r.prompt, key=self.environments.key(r.prompt.columns))
                for i in range(r.num_samples)
            ]
            for r in sampler.requests(prompts, num_samples, params)
        ]
        episodes = [episode for group in groups for episode in group]
        try:
            with watch("env"):
                self._ask_all(episodes, self._reset, self._begin)
            going = [episode for episode in episodes if episode.stop_reason is None]
            for turn in range(1, self.limits.max_turns + 1):
                going = [episode for episode in going if self._has_room(episode, params)]
                if not going:
                    break
                with watch("sample"):
                    self._sample(sampler, going, params)
                going = [episode for episode in going if episode.stop_reason is None]
                with watch("env"):
                    answers = self._ask_all(going, _step)
                    for episode, answer in answers.items():
                        self._answer(episode, answer, params, is_last=turn == self.limits.max_turns)
                going = [episode for episode in going if episode.stop_reason is None]
            if self.environments.gives_reward:
                with watch("env"):
                    for episode, reward in self._ask_all([e for e in episodes if not e.is_lost], _reward).items():
                        if reward is not None:
                            episode.rewards.append(_number(episode, "reward", reward))
        finally:
            self._put_back(episodes)
        self._check_losses(episodes, is_first=params.step in (None, 0, 1))
        return [tuple(episode.trajectory() for episode in group) for group in groups]

    def close(self) -> None:
        """Close the environments that are not in use."""
        idle = [env for envs in self._idle.values() for env in envs]
        self._idle.clear()
        if idle:
            closing = [partial(ask, env.close) for env in idle]
            self._within(closing, [self.limits.turn_deadline] * len(idle), poll=lambda: None)
        self._leave_loop()

    # --- one round ------------------------------------------------------------------------------------------------

    def _has_room(self, episode: Episode, params: SamplingParams) -> bool:
        room, reason = episode.limit(params, self.limits)
        if room < 1:
            episode.stop_reason = reason
        return room >= 1

    def _sample(self, sampler: Sampler, going: Sequence[Episode], params: SamplingParams) -> None:
        """Sample the next turn of these episodes. Those of a prompt begin together: it runs through the model once."""
        requests: list[SampleRequest] = []
        for _, run in groupby(going, key=lambda episode: id(episode.request)):
            same = list(run)
            first = same[0]
            begins = not first.tokens and all(e.prompt.token_ids == first.prompt.token_ids for e in same)
            if begins and len(same) == first.request.num_samples:
                room, _ = first.limit(params, self.limits)
                requests.append(replace(first.request, prompt=first.prompt, max_new_tokens=room))
                continue
            for episode in same:
                so_far = replace(episode.prompt, token_ids=episode.prompt.token_ids + tuple(episode.tokens))
                room, _ = episode.limit(params, self.limits)
                requests.append(
                    replace(
                        episode.request,
                        prompt=so_far,
                        num_samples=1,
                        first=episode.sample,
                        position=len(episode.tokens),
                        max_new_tokens=room,
                    )
                )
        turns = [turn for samples in sampler.answers(requests, params) for turn in samples]
        for episode, turn in zip(going, turns, strict=True):
            _, reason = episode.limit(params, self.limits)
            message = self.codecs[episode.key].parse(turn.tokens)
            episode.add_turn(turn, {**message, "content": turn.text} if params.stop else message)
            if turn.stop_reason == "length":
                episode.stop_reason = reason

    def _answer(self, episode: Episode, answer: Any, params: SamplingParams, *, is_last: bool) -> None:
        """Enter what the environment says to a turn."""
        if not isinstance(answer, Answer):
            raise InputError(
                f"step of {type(episode.env).__name__} must return a gruppo.turns.Answer, got {type(answer).__name__}"
            )
        if answer.reward is not None:
            episode.rewards.append(_number(episode, "step", answer.reward))
        episode.messages += answer.messages
        if answer.is_over or not answer.messages:
            episode.stop_reason = "done" if answer.is_over else "stop"
        elif is_last:
            episode.stop_reason = "turns"
        else:
            given = self.codecs[episode.key].between(episode.tokens[-1], answer.messages)
            room, reason = episode.limit(params, self.limits, len(given))
            if room < 1:
                episode.stop_reason = reason
            else:
                episode.tokens += given
                episode.sampled += [False] * len(given)

    # --- environments ---------------------------------------------------------------------------------------------

    async def _reset(self, episode: Episode) -> Any:
        """Give an episode an environment and begin it."""
        idle = self._idle.get(episode.key)
        env = episode.env = idle.pop() if idle else await ask(self.environments.factories[episode.key])
        request = episode.request
        (key,) = row_keys(request.seed, request.step, np.array([request.number]), np.array([0])).tolist()
        prompt = episode.prompt
        row = {"prompt": prompt.source, **prompt.columns}
        return await ask(env.reset, _copied(row), key >> 33)  # rewards and other episodes read the row too

    def _begin(self, episode: Episode, messages: Any) -> None:
        """The prompt of an episode whose environment gives one of its own."""
        if messages is None:
            return
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise InputError(
                f"reset of {type(episode.env).__name__} must return a list of messages or None, got {messages!r:.80}"
            )
        length, context = sum(len(m.get("content") or "") for m in messages), self.limits.max_context
        if context is not None and length > MAX_TOKEN_CHARS * context:
            episode.stop_reason = "env_error"
            episode.error = f"reset gave a prompt of {length} characters for a context of {context} tokens; give less"
            return
        ids, text = self.codecs[episode.key].first(conversation(messages, self.system))
        episode.prompt = replace(episode.prompt, token_ids=ids, text=text, source=deepcopy(list(messages)))

    def _ask_all(
        self,
        episodes: Sequence[Episode],
        question: Callable[[Episode], Coroutine[Any, Any, Any]],
        enter: Callable[[Episode, Any], None] = lambda episode, answer: None,
    ) -> dict[Episode, Any]:
        """The answers of all environments by episode. One that is late or fails loses its episode."""
        limits = self.limits
        seconds = [max(min(limits.turn_deadline, limits.episode_deadline - e.seconds), 0.0) for e in episodes]
        found = self._within([partial(_timed, question, e) for e in episodes], seconds, poll=self.poll)
        answers = {}
        for episode, within, outcome in zip(episodes, seconds, found, strict=True):
            if outcome is LATE:
                name = "turn_deadline" if within == limits.turn_deadline else "episode_deadline"
                method = question.__name__.removeprefix("_")
                episode.stop_reason = "deadline"
                episode.error = f"{method} took longer than {name}={getattr(limits, name):g} s"
            elif isinstance(outcome, GruppoError):  # a wrong kind of answer: the same in every step
                raise outcome
            elif isinstance(outcome, BaseException):
                episode.stop_reason, episode.error = "env_error", short_traceback(outcome)
            else:
                answers[episode] = outcome
                enter(episode, outcome)
        return answers

    def _within(self, questions: Sequence[Question], seconds: Sequence[float], *, poll: Poll) -> list[Any]:
        """What each question gives, the exception that it ends with, or LATE if it takes longer than its seconds."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(CallExecutor())
            self._is_left = threading.Event()
            loop = (self._loop, self._is_left)
            threading.Thread(target=_run, args=loop, name="environments", daemon=True).start()
        outcomes: list[Any] = [LATE] * len(questions)
        home = os.getcwd()
        answered = asyncio.run_coroutine_threadsafe(_answer_all(questions, seconds, outcomes), self._loop)
        ends = time.monotonic() + max(seconds, default=0.0) + 2 * GRACE
        try:
            while not answered.done() and time.monotonic() < ends:
                poll()
                wait([answered], timeout=WAIT)
        except BaseException:
            answered.cancel()
            raise
        finally:
            os.chdir(home)  # the run writes to paths that begin there
        if answered.done():
            answered.result()
        else:
            # An `async` method that never awaits holds the loop: what is bound to that loop is given up with it.
            self._leave_loop()
            self._idle = {}
        return list(outcomes)

    def _leave_loop(self) -> None:
        """Let the event loop end once it is free. The next question begins another."""
        if self._loop is not None:
            self._is_left.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _put_back(self, episodes: Iterable[Episode]) -> None:
        """Environments of episodes that are over wait for the next; one that was lost, or not finished, is let go."""
        for episode in episodes:
            if episode.env is not None and episode.stop_reason is not None and not episode.is_lost:
                self._idle.setdefault(episode.key, []).append(episode.env)
            elif episode.env is not None and self._loop is not None:
                closing = partial(ask, episode.env.close)
                asyncio.run_coroutine_threadsafe(
                    _answer_all([closing], [self.limits.turn_deadline], [LATE]), self._loop
                )
            episode.env = None

    def _check_losses(self, episodes: Sequence[Episode], *, is_first: bool) -> None:
        """End the run where too many episodes are lost."""
        lost = [episode for episode in episodes if episode.is_lost]
        self._played, self._lost = self._played + len(episodes), self._lost + len(lost)
        if is_first and lost and self._lost == self._played:
            reason = "none of the first step was played to its end"
        elif len(lost) >= FREE_LOSSES and len(lost) > MAX_LOST_OF_STEP * len(episodes):
            reason = f"the step may lose {MAX_LOST_OF_STEP:.0%}"
        elif self._lost >= FREE_LOSSES and self._lost > MAX_LOST_OF_RUN * self._played:
            reason = f"{self._lost} of {self._played} are lost in this run, which may lose {MAX_LOST_OF_RUN:.0%}"
        else:
            return
        late = sum(episode.stop_reason == "deadline" for episode in lost)
        raise RewardError(
            f"the environment failed in {len(lost)} of {len(episodes)} episodes ({late} late, {len(lost) - late} with "
            f"an error): {reason}. The first failure:\n{lost[0].error}"
        )


def _run(loop: asyncio.AbstractEventLoop, is_left: threading.Event) -> None:
    """Run an event loop until it is left, and end what is still in it."""
    while not is_left.is_set():
        with suppress(SystemExit, KeyboardInterrupt):  # of a task that the user's code has begun: one awaits it
            loop.run_forever()
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


async def _answer_all(questions: Sequence[Question], seconds: Sequence[float], outcomes: list[Any]) -> None:
    """Ask all questions at once and put what each gives, or raises, into its place; late ones are cancelled."""
    started = time.monotonic()
    tasks = [asyncio.ensure_future(_settle(question, outcomes, i)) for i, question in enumerate(questions)]
    try:
        for limit in sorted(set(seconds)):  # as a rule one
            due = [task for task, own in zip(tasks, seconds, strict=True) if own == limit]
            _, late = await asyncio.wait(due, timeout=max(started + limit - time.monotonic(), 0.0))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=GRACE)
    finally:
        for task in tasks:
            task.cancel()


async def _settle(question: Question, outcomes: list[Any], place: int) -> None:
    try:
        outcomes[place] = await question()
    except BaseException as error:  # SystemExit would end the loop
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        outcomes[place] = error


async def _timed(question: Callable[[Episode], Coroutine[Any, Any, Any]], episode: Episode) -> Any:
    started = time.monotonic()
    try:
        return await question(episode)
    finally:
        episode.seconds += time.monotonic() - started


async def _step(episode: Episode) -> Any:
    assert episode.env is not None, "an episode that goes on has its environment"
    return await ask(episode.env.step, deepcopy(episode.messages[-1]))  # rewards read what the policy said


def _copied(value: Any) -> Any:
    """A copy of the lists and dicts of a row. Other objects, which need not have copies, are the row's own."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


async def _reward(episode: Episode) -> Any:
    assert episode.env is not None, "an episode that goes on has its environment"
    return await ask(episode.env.reward)


def _number(episode: Episode, method: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{method} of {type(episode.env).__name__} gave the reward {value!r:.60}, no number"
        ) from error
    if not np.isfinite(number):
        raise InputError(f"{method} of {type(episode.env).__name__} gave the reward {number}; give a finite number")
    return number
