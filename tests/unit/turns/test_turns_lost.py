"""Episodes whose environment failed: no reward, no part in their group's numbers, nothing to train on."""

import math
from dataclasses import replace

import pytest
import torch
from turn_episodes import play, prompts_of

from gruppo.advantage import ADVANTAGES, PassAtKAdvantage
from gruppo.errors import InputError
from gruppo.loss import DAPOLoss, GRPOLoss
from gruppo.model import TransformersModel
from gruppo.reward import RewardShape
from gruppo.rollout.evaluate import evaluate
from gruppo.rollout.source import SolvedPrompts
from gruppo.task.calculator import calculator_rows, multiply
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.advantages import AdvantageAssigner
from gruppo.turns import Answer, Environment, tool_schema
from gruppo.turns.player import TurnLimits
from gruppo.turns.tools import Toolbox
from gruppo.types import Group, Prompt, Rollout, Trajectory

ROWS = calculator_rows("train")[:40]


# --- advantages -------------------------------------------------------------------------------------------------------


def rollout(reward, *, correct=None, tokens=(7, 2)):
    lost = {"stop_reason": "env_error", "error": "gone"} if reward is None else {}
    trajectory = Trajectory(
        prompt=Prompt(token_ids=(5,)), tokens=tokens, sampled=(True,) * len(tokens), logps=(-1.0,) * len(tokens), **lost
    )
    return Rollout(trajectory=trajectory, reward=reward, rewards={"r": reward}, correct=correct)


OTHERS = [rollout(1.0, correct=True), rollout(0.0, correct=False, tokens=(7, 8, 2)), rollout(0.0, correct=False)]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_lost_episode_changes_no_other_advantage_and_has_none(name):
    estimate = ADVANTAGES[name](**({"k": 2} if name == "pass_at_k" else {}))
    shape = RewardShape(max_length=4, overlong_cache=2)
    assigner = AdvantageAssigner(estimate=estimate, shape=shape, weights={"r": 1.0}, correct_by="r")

    def advantages(rollouts):
        group = Group(prompt=Prompt(token_ids=(5,)), rollouts=tuple(rollouts), greedy=OTHERS[1])
        (found,) = assigner.assign([group])
        return [(r.shaped, r.advantage, r.is_masked) for r in found.rollouts]

    alone = advantages(OTHERS)
    assert any(advantage for _, advantage, _ in alone)
    for lost in (rollout(None), rollout(None, tokens=())):
        found = advantages([OTHERS[0], lost, *OTHERS[1:]])
        assert found.pop(1) == (None, 0.0, True)
        assert found == [(shaped, pytest.approx(advantage), False) for shaped, advantage, _ in alone]


def test_the_mean_of_a_group_is_over_those_that_were_played():
    """1, 0 and 0 about 1/3; with the lost one as a 0 it would be 1/4."""
    assigner = AdvantageAssigner(
        estimate=ADVANTAGES["drgrpo"](), shape=RewardShape(max_length=4), weights={"r": 1.0}, correct_by=None
    )
    group = Group(prompt=Prompt(token_ids=(5,)), rollouts=(*OTHERS, rollout(None)))
    (found,) = assigner.assign([group])
    assert [r.advantage for r in found.rollouts] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])


def test_pass_at_k_of_a_whole_group_teaches_nothing_where_one_is_lost():
    """A run of groups of four with k=4 must not end for a tool that failed once."""
    rewards, ids = [1.0, 0.0, 0.0, None], [0] * 4
    assert PassAtKAdvantage(k=4)(rewards, group_ids=ids).tolist() == [0] * 4
    with pytest.raises(InputError, match="k=5 is more than the 4 rewards of the largest group"):
        PassAtKAdvantage(k=5)(rewards, group_ids=ids)


def test_a_prompt_with_a_lost_episode_is_not_solved():
    solved = SolvedPrompts(after=1, num_prompts=3, keep=1)
    solved.see([(0, [True, None]), (1, [True, True])])
    assert solved.retired == {1}


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("loss", [GRPOLoss, DAPOLoss])
def test_a_lost_episode_has_no_gradient_with_a_kl_penalty_and_an_entropy_bonus(loss, layout):
    """What it had written before it was lost might be anything: the gradient is that of one without a token."""
    model = TransformersModel("builtin-chat", device="cpu", layout=layout)
    (episodes,) = play(model, prompts=prompts_of(model)[:1], limits=TurnLimits(max_turns=2))
    model.set_loss(loss(beta=0.1, entropy_coef=0.05))
    with torch.no_grad():
        model.reference()
        for parameter in model.model.parameters():
            parameter.mul_(1.01)  # else the KL to the reference is 0

    def gradient(lost):
        lost = replace(lost, stop_reason="deadline", logps=(-1.0,) * lost.num_sampled)
        rollouts = [Rollout(trajectory=t, advantage=a) for t, a in zip(episodes, (1.0, -1.0, 0.0, 1.0), strict=True)]
        rollouts[1] = Rollout(trajectory=lost, is_masked=True)
        model.model.zero_grad()
        result = model.forward_backward(rollouts)
        return float(result.loss), torch.cat([p.grad.flatten() for p in model.model.parameters()])

    empty = replace(episodes[1], tokens=(), sampled=(), logps=(), entropies=())
    value, expected = gradient(empty)
    other, found = gradient(replace(episodes[1], entropies=None))
    assert float(expected.norm()) > 0.01
    assert other == pytest.approx(value, rel=1e-5)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


# --- runs -------------------------------------------------------------------------------------------------------------


class Fails(Environment):
    """The calculator, which fails before the first turn of every seventh episode and after that of every ninth."""

    tools = (tool_schema(multiply),)
    begun, first = 0, 0

    async def reset(self, row, seed):
        Fails.begun += 1
        self.number = Fails.begun
        if self.number > Fails.first and self.number % 7 == 0:
            raise OSError("no calculator")

    async def step(self, message):
        if self.number > Fails.first and self.number % 9 == 0:
            raise ValueError("overflow")
        return await Toolbox([multiply]).answer(message)


class FailsToBegin(Fails):
    """The calculator, which fails before the first turn of every fifth episode, whichever the threads make that."""

    async def reset(self, row, seed):
        Fails.begun += 1
        if Fails.begun % 5 == 0:
            raise OSError("no calculator")

    async def step(self, message):
        return await Toolbox([multiply]).answer(message)


class Gone(Environment):
    """Plays eight episodes, a step of these tests, and then no more."""

    tools, begun = Fails.tools, 0

    async def reset(self, row, seed):
        Gone.begun += 1
        if Gone.begun > 8:
            raise OSError("gone")

    async def step(self, message):
        return Answer(is_over=True)


@pytest.fixture
def trainer_of(tmp_path):
    made = []

    def make(environment=Fails, **options):
        Fails.begun = Gone.begun = 0
        usual = {"model": "builtin-chat", "output": str(tmp_path / "run"), "max_new_tokens": 30, "max_turns": 3}
        usual |= {"steps": 3, "prompts_per_step": 2, "group_size": 8, "lr": 1e-3, "threads": 1, "seed": 3}
        usual |= {
            "rewards": ["exact_match", "length_penalty"],
            "eval_prompts": 0,
            "tensorboard": False,
            "temperature": 1.5,
        }
        config = TrainConfig(**usual | options)
        made.append(GRPOTrainer(config, data=ROWS, environment=environment, quiet=True))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def lost_and_played(trainer):
    rollouts = [r for group in trainer.groups for r in group.rollouts]
    return [r for r in rollouts if r.trajectory.is_lost], [r for r in rollouts if not r.trajectory.is_lost]


@pytest.mark.parametrize(
    "options",
    [
        {"kl_in_reward": 0.1, "beta": 0.1, "entropy_coef": 0.01},
        {"minibatches": 2, "epochs_per_batch": 2, "kl_in_reward": 0.1, "loss": "gspo"},
        {"advantage": "remax"},
        {"advantage": "gdpo", "max_staleness": 1},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_step_with_lost_episodes_trains_on_the_others(options, trainer_of):
    trainer = trainer_of(**options)
    before = [p.clone() for p in trainer.model.model.parameters()]
    metrics = trainer.step()
    lost, played = lost_and_played(trainer)
    assert sorted(len(r.trajectory.messages) for r in lost) == [0, 0, 1]
    assert [(r.reward, r.shaped, r.correct, r.advantage, r.is_masked) for r in lost] == [
        (None, None, None, 0, True)
    ] * 3
    assert {len(r.trajectory.tokens) for r in lost if not r.trajectory.messages} == {0}
    assert all(r.reward is not None and not r.is_masked for r in played)
    assert metrics["reward/mean"] == pytest.approx(sum(r.reward for r in played) / 13)
    assert metrics["turns/lost_frac"] == 3 / 16
    assert all(math.isfinite(value) for value in metrics.values())
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.model.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"kl_in_reward": 0.1, "advantage": "gdpo", "minibatches": 2}], ids=str)
def test_a_step_whose_episodes_are_all_lost_teaches_nothing(options, trainer_of):
    trainer = trainer_of(Gone, group_size=4, **options)
    trainer.step()
    before = [p.clone() for p in trainer.model.model.parameters()]
    metrics = trainer.step()
    lost, played = lost_and_played(trainer)
    assert (len(lost), len(played), metrics["turns/lost_frac"]) == (8, 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.model.parameters(), strict=True))


def test_dynamic_sampling_judges_groups_by_the_episodes_that_were_played(trainer_of):
    trainer = trainer_of(dynamic_sampling=3, advanced={"retire_solved": 1})
    trainer.step()
    assert any(r.trajectory.is_lost for group in trainer.groups for r in group.rollouts)
    for group in trainer.groups:
        rewards = {r.reward for r in group.rollouts if not r.trajectory.is_lost}
        assert (group.status == "no_signal") == (len(rewards) == 1)


def test_a_lost_episode_of_the_evaluation_is_not_right_and_has_no_reward(trainer_of):
    trainer = trainer_of(eval_prompts=20)
    driver, params = trainer.source.driver, trainer.source.params
    Fails.begun = 0
    found = evaluate(trainer.prompts.held_out.prompts, driver, params)
    lost = [r for r in found.greedy if r.trajectory.is_lost]
    played = [r for r in found.greedy if not r.trajectory.is_lost]
    assert (len(lost), len(played)) == (4, 16)  # 7, 9, 14, 18
    assert found.metrics["eval/accuracy"] == sum(r.correct is True for r in played) / 20
    assert found.metrics["eval/reward"] == pytest.approx(sum(r.reward for r in played) / 16)


def test_the_run_says_once_that_the_environment_failed_and_how_often(trainer_of, caplog):
    trainer = trainer_of(FailsToBegin, steps=1)
    trainer.train()
    (said,) = [each.getMessage() for each in caplog.records if "failed" in each.getMessage()]
    assert said == (
        "step 1: the environment failed in 3 of 16 episodes: OSError: no calculator (traceback in events.jsonl; later "
        "failures are only counted, in turns/lost_frac)"
    )
    (event,) = [e for e in trainer.run.events() if e["event"] == "episodes_lost"]
    assert "OSError: no calculator" in event["traceback"]


def test_an_evaluation_amid_a_run_may_lose_all_of_its_few_episodes(trainer_of):
    trainer = trainer_of(Gone, group_size=4, eval_prompts=4)
    trainer.step()
    found = trainer.evaluate()
    assert found.metrics["eval/accuracy"] == 0 and "eval/reward" not in found.metrics
