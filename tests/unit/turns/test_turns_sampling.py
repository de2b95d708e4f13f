"""Episodes of up to ten turns: their log-probs are the trainer's, and each token has the draw of its own place."""

import pytest
import torch
from turn_episodes import Answers, Users, flat, play, prompts_of, turns_of

from gruppo.model import TransformersModel
from gruppo.random import row_keys, row_uniforms
from gruppo.types import Rollout

GAP = 2e-5


@pytest.fixture(scope="module")
def model():
    return TransformersModel("builtin-chat", device="cpu")


@pytest.fixture(scope="module")
def episodes(model):
    return play(model)


def gap_to_trainer(model, episodes):
    scored = model.forward_only([Rollout(trajectory=episode) for episode in episodes])["logps"]
    return max(float((torch.tensor(e.logps) - own).abs().max()) for e, own in zip(episodes, scored, strict=True))


def plain_logps(model, episode):
    """Log-probs at every place of an episode by one plain forward of all its tokens."""
    ids = torch.tensor([episode.prompt_ids + episode.tokens])
    with torch.no_grad():
        logits = model.model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(episode.prompt_ids) - 1 : -1].double().log_softmax(-1)


def test_log_probs_over_ten_turns_of_tool_answers_are_the_trainers(model, episodes):
    found = flat(episodes)
    assert {len(turns_of(episode)) for episode in found} == {10}
    assert gap_to_trainer(model, found) <= GAP
    for episode in found[:3]:
        places = [i for i, is_sampled in enumerate(episode.sampled) if is_sampled]
        plain = plain_logps(model, episode)[places, list(episode.sampled_tokens)]
        assert float((torch.tensor(episode.logps) - plain).abs().max()) <= GAP


@pytest.mark.parametrize("way", ["together", "by length", "recomputed"])
def test_log_probs_over_ten_turns_of_a_users_answers_are_the_trainers(model, way):
    found = flat(play(model, Users, way=way, num_samples=2))
    assert {len(turns_of(episode)) for episode in found} == {10}
    assert gap_to_trainer(model, found) <= GAP


def test_the_turns_of_an_episode_follow_one_another_in_its_draws(model, episodes):
    """The draw for token i of an episode, sampled or given, is draw i of its row: no turn repeats another's."""
    num_moved = 0
    for number, group in enumerate(episodes):
        for sample, episode in enumerate(group):
            row = torch.tensor([number]).numpy(), torch.tensor([sample]).numpy()
            places = [i for i, is_sampled in enumerate(episode.sampled) if is_sampled]
            log_p = plain_logps(model, episode)
            within = [i - start for start, stop in turns_of(episode) for i in range(start, stop)]
            for numbers in (places, within):
                drawn = []
                for place, number_of_draw in zip(places, numbers, strict=True):
                    (u,) = row_uniforms(row_keys(3, 1, *row), number_of_draw)
                    cumulative = log_p[place].exp().cumsum(0)
                    drawn.append(int((cumulative <= u * cumulative[-1]).sum()))
                if numbers is places:
                    assert tuple(drawn) == episode.sampled_tokens
                else:
                    num_moved += tuple(drawn) != episode.sampled_tokens
    assert num_moved == 12


def test_an_episode_alone_draws_what_it_draws_in_a_batch(model, episodes):
    prompt = prompts_of(model)[1]
    ((alone,),) = play(model, prompts=[prompt], num_samples=1)
    assert (alone.tokens, alone.sampled) == (episodes[1][0].tokens, episodes[1][0].sampled)
    assert alone.logps == pytest.approx(episodes[1][0].logps, abs=GAP)


def test_the_same_seeds_play_the_same_episodes_to_the_bit(model, episodes):
    assert play(model) == episodes
    (first, *_) = play(model, prompts=prompts_of(model)[:1], step=2)
    assert all(a.tokens != b.tokens for a, b in zip(first, episodes[0], strict=True))


def test_greedy_episodes_do_not_depend_on_the_seed_of_the_draws(model):
    class Same(Answers):
        def reset(self, row, seed):
            super().reset(row, 7)

    first, again = (play(model, Same, num_samples=1, temperature=0.0, seed=seed) for seed in (3, 4))
    assert first == again
    assert {len(turns_of(episode)) for episode in flat(first)} == {10}
