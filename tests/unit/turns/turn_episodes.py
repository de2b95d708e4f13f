"""Episodes of the embedded chat model, for tests of what is trained on: who answers, how often, and with how much."""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import pairwise
from typing import Any

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task.calculator import question
from gruppo.turns import Answer, Environment
from gruppo.turns.chat import ChatCodec
from gruppo.turns.environment import Environments
from gruppo.turns.player import Player, TurnLimits
from gruppo.types import Message, Prompt, Trajectory

PAIRS = ((37, 48), (11, 99), (64, 25))


class Answers(Environment):
    """Answers each turn by a number of as many digits as it has been asked, until it has been asked often enough."""

    role, num_turns, longest = "tool", 10, 4

    def reset(self, row: Any, seed: int) -> None:
        self.asked, self.seed = 0, seed

    def step(self, message: Message) -> Answer:
        self.asked += 1
        if self.asked == self.num_turns:
            return Answer(is_over=True, reward=1.0)
        text = str(self.seed % 10) * (1 + self.asked % self.longest)
        return Answer(messages=({"role": self.role, "content": text},))  # type: ignore[arg-type]


class Users(Answers):
    role = "user"


def codec_of(model: TransformersModel) -> ChatCodec:
    return ChatCodec(model.tokenizer, [model.tokenizer.eos_token_id])


def prompts_of(model: TransformersModel) -> list[Prompt]:
    made = []
    for index, (a, b) in enumerate(PAIRS):
        ids, text = codec_of(model).first([question(a, b)])
        columns = {"answer": str(a * b)}
        made.append(Prompt(token_ids=ids, text=text, source=[question(a, b)], columns=columns, index=index))
    return made


def play(
    model: TransformersModel,
    make: Any = Answers,
    *,
    prompts: Sequence[Prompt] | None = None,
    num_samples: int = 4,
    way: Any = None,
    limits: TurnLimits | None = None,
    **params: Any,
) -> list[tuple[Trajectory, ...]]:
    """The episodes of each prompt."""
    sampler = TorchSampler(model)
    sampler.way = way
    given = SamplingParams(**{"max_new_tokens": 120, "seed": 3, "step": 1} | params)
    environments = Environments({"": make}, {"": ()})
    with closing(Player(environments, {"": codec_of(model)}, limits)) as player:
        chosen = prompts_of(model) if prompts is None else prompts
        return player.play(sampler, chosen, num_samples, given, lambda stage: nullcontext())


def flat(groups: Any) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group]


def turns_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Where each run of sampled tokens begins and ends."""
    marks = (False, *(trajectory.sampled or ()), False)
    edges = [i for i, (one, other) in enumerate(pairwise(marks)) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))
