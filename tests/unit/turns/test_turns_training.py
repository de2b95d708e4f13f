"""What is trained on in episodes of several turns: the sampled tokens, and of the given ones nothing."""

import random
from dataclasses import replace
from math import log

import pytest
import torch
from turn_episodes import flat, play, prompts_of

from gruppo.batch import Totals, pack
from gruppo.loss import LOSSES, DAPOLoss, GRPOLoss, GSPOLoss
from gruppo.loss.inputs import LossInputs
from gruppo.metric import GRPOMetric
from gruppo.model import TransformersModel
from gruppo.trainer.learner import Learner, TokenRecord
from gruppo.turns.player import TurnLimits
from gruppo.types import Group, Prompt, Rollout, Trajectory

GARBAGE = (float("nan"), float("inf"), -1e4)


@pytest.fixture(scope="module")
def groups():
    """Three groups of four episodes of four turns, with advantages and old log-probs that are not the policy's."""
    model, rng = TransformersModel("builtin-chat", device="cpu"), random.Random(5)
    made = []
    for prompt, found in zip(prompts_of(model), play(model, limits=TurnLimits(max_turns=4)), strict=True):
        rollouts = []
        for episode in found:
            old = tuple(logp - rng.gauss(0, 0.3) for logp in episode.logps)
            reference = tuple(logp - rng.gauss(0, 0.3) for logp in episode.logps)
            advantage = rng.uniform(-1, 1)
            rollouts.append(Rollout(trajectory=episode, advantage=advantage, old_logps=old, ref_logps=reference))
        made.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    assert {r.trajectory.stop_reason for r in all_of(made)} == {"turns"}
    return made


def all_of(groups):
    return [rollout for group in groups for rollout in group.rollouts]


# --- labels -----------------------------------------------------------------------------------------------------------


def test_the_labels_are_the_sampled_tokens_and_no_other_slot_has_a_number(groups):
    rollouts = all_of(groups)
    batch = pack(rollouts)
    assert batch.labels[batch.labels != -100].tolist() == [t for r in rollouts for t in r.trajectory.sampled_tokens]
    assert batch.lengths == tuple(r.trajectory.num_sampled for r in rollouts)
    assert sum(map(len, (r.trajectory.tokens for r in rollouts))) > 2 * sum(batch.lengths)  # most are given
    for name in ("advantages", "old_logps", "ref_logps", "sampler_logps"):
        assert not getattr(batch, name)[batch.labels == -100].any(), name
    assert batch.old_logps[batch.scored].tolist() == pytest.approx([x for r in rollouts for x in r.old_logps])
    assert Totals.of_step(rollouts).tokens == sum(batch.lengths)


def test_the_labels_of_an_episode_by_hand():
    """Prompt 5 6; the policy writes 7 2, is given 9 9, and writes 8. The last token has no slot."""
    batch = pack([two_turns()])
    assert batch.input_ids.tolist() == [5, 6, 7, 2, 9, 9]
    assert batch.labels.tolist() == [-100, 7, 2, -100, -100, 8]


# --- the loss ---------------------------------------------------------------------------------------------------------


def two_turns():
    trajectory = Trajectory(
        prompt=Prompt(token_ids=(5, 6)),
        tokens=(7, 2, 9, 9, 8),
        sampled=(True, True, False, False, True),
        logps=(-1.0, -1.0, -1.0),
    )
    return Rollout(trajectory=trajectory, advantage=1.0, old_logps=(-1.0, -1.0 - log(1.1), -1.0 - log(1.5)))


def one_turn():
    trajectory = Trajectory(prompt=Prompt(token_ids=(5,)), tokens=(3, 2), logps=(-1.0, -1.0))
    return Rollout(trajectory=trajectory, advantage=-1.0, old_logps=(-1.0 - log(0.5), -1.0))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # A = 1 with ratios 1, 1.1, 1.5, the last clipped to 1.2; A = -1 with ratios 0.5, clipped to 0.8, and 1.
        (GRPOLoss(clip_range=0.2), (-(1 + 1.1 + 1.2) / 3 + (0.8 + 1) / 2) / 2),
        (DAPOLoss(clip_range=0.2), (-(1 + 1.1 + 1.2) + (0.8 + 1)) / 5),
        # one ratio per episode, the geometric mean over its sampled tokens
        (GSPOLoss(clip_range=0.9), (-((1 * 1.1 * 1.5) ** (1 / 3)) + 0.5**0.5) / 2),
    ],
    ids=["grpo", "dapo", "gspo"],
)
def test_the_loss_of_an_episode_of_two_turns_by_hand(loss, expected):
    batch = pack([two_turns(), one_turn()])
    logps = torch.full_like(batch.advantages, -1.0)
    given = {"old_logps": batch.old_logps, "advantages": batch.advantages}
    assert float(loss(batch.loss_inputs(), {"logps": logps}, **given).loss) == pytest.approx(expected, abs=1e-6)
    inputs = LossInputs.of(batch, logps[batch.scored], None, Totals.of_step([two_turns(), one_turn()]))
    assert float(loss.compute(inputs).loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_episodes_is_that_of_their_sampled_tokens_alone(name, garbage, groups):
    """With a KL penalty and an entropy bonus, the same log-probs, and garbage wherever a token was given."""
    batch = pack(all_of(groups))
    draw = torch.Generator().manual_seed(3)
    normal = lambda: torch.randn(batch.labels.shape, generator=draw, dtype=torch.float64)  # noqa: E731
    logps = batch.sampler_logps.double() + 0.1 * normal()
    values = {"logps": logps, "entropies": normal().abs(), "old_logps": logps + 0.3 * normal()}
    values |= {"ref_logps": logps + 0.3 * normal(), "sampler_logps": logps + 0.1 * normal(), "advantages": normal()}
    is_given = batch.labels == -100
    loss = LOSSES[name](beta=0.1, entropy_coef=0.01)

    def outcome(inputs, taken):
        leaves = {key: taken[key].clone().requires_grad_() for key in ("logps", "entropies")}
        found = loss(inputs, leaves, **{key: value for key, value in taken.items() if key not in leaves})
        found.loss.backward()
        return found.loss, *(leaf.grad if leaf.grad is not None else torch.zeros(1) for leaf in leaves.values())

    spoilt = {key: torch.where(is_given, garbage, value) for key, value in values.items()}
    whole = outcome(batch.loss_inputs(), spoilt)
    alone = {"labels": batch.labels[batch.scored], "cu_seqlens": batch.offsets}
    expected = outcome(alone, {key: value[batch.scored] for key, value in values.items()})
    assert torch.allclose(whole[0], expected[0], rtol=1e-12, atol=1e-14)
    for grad, grad_alone in zip(whole[1:], expected[1:], strict=True):
        if len(grad) == len(is_given):
            assert not grad[is_given].any()
            grad = grad[batch.scored]
        torch.testing.assert_close(grad, grad_alone, rtol=1e-10, atol=1e-14)


# --- the gradient -----------------------------------------------------------------------------------------------------

SUMMED = {"grpo": GRPOLoss(beta=0.1, entropy_coef=0.01), "gspo": GSPOLoss(clip_range=0.3, beta=0.1)}


def gradient(groups, loss, **options):
    model = TransformersModel("builtin-chat", device="cpu", **options)
    model.model.double()
    model.set_loss(loss)
    result = model.forward_backward(all_of(groups))
    assert model.planner.layout == options["layout"]  # a model that fails the comparison would fall back
    return float(result.loss), torch.cat([p.grad.flatten() for p in model.model.parameters()])


@pytest.mark.parametrize("loss", SUMMED)
def test_all_layouts_and_micro_batches_give_one_gradient(loss, groups):
    value, expected = gradient(groups[:2], SUMMED[loss], layout="padded")
    ways = [
        {"layout": "packed"},
        {"layout": "shared"},
        {"layout": "padded", "tokens_per_microbatch": 200},
        {"layout": "shared", "tokens_per_microbatch": 300},
    ]
    for way in ways:
        other, found = gradient(groups[:2], SUMMED[loss], **way)
        assert other == pytest.approx(value, rel=1e-6), way
        assert float((found - expected).norm() / expected.norm()) < 1e-6, way


def test_what_was_given_after_the_last_turn_changes_nothing(groups):
    """An answer that no turn followed is not part of an episode; if it were, no sampled token would see it."""
    longer = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            t = rollout.trajectory
            given = replace(t, tokens=(*t.tokens, 9, 9, 9), sampled=(*t.sampled, False, False, False))
            rollouts.append(replace(rollout, trajectory=given))
        longer.append(replace(group, rollouts=tuple(rollouts)))
    value, expected = gradient(groups[:1], DAPOLoss(), layout="packed")
    other, found = gradient(longer[:1], DAPOLoss(), layout="packed")
    assert other == pytest.approx(value, rel=1e-12)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


# --- what an update records -------------------------------------------------------------------------------------------


def test_an_update_notes_one_number_of_each_sampled_token_and_counts_no_other(groups):
    model = TransformersModel("builtin-chat", device="cpu", tokens_per_microbatch=400)
    model.set_loss(GRPOLoss(clip_range=0.01))
    model.add_metric(GRPOMetric())
    start = {name: value.clone() for name, value in model.model.state_dict().items()}
    tokens = TokenRecord()
    _, metrics = Learner(model=model, minibatches=3).update(groups, tokens)
    recorded = tokens.given_to(groups)()
    num_clipped = 0
    for group in recorded:
        for rollout in group.rollouts:
            n = rollout.trajectory.num_sampled
            assert [len(x) for x in (rollout.policy_logps, rollout.entropies, rollout.clipped)] == [n] * 3
            num_clipped += sum(map(bool, rollout.clipped))
    assert num_clipped > 20
    model.model.load_state_dict(start)
    first = recorded[0].rollouts  # seen by the first update, from the weights of the start
    scored = model.forward_only(list(first))
    for rollout, logps, entropies in zip(first, scored["logps"], scored["entropies"], strict=True):
        assert rollout.policy_logps == pytest.approx(logps.tolist(), abs=2e-5)
        assert rollout.entropies == pytest.approx(entropies.tolist(), abs=2e-5)
    assert metrics["live/frac"] == 1
    assert len(flat([g.rollouts for g in recorded])) == 12
