"""From rewards to advantages within a run: estimators, shapes, KL in the reward, a reference that moves."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from step_rewards import rollouts_of

from gruppo.advantage import ADVANTAGES
from gruppo.errors import InputError
from gruppo.sampler import SamplingParams
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.build import build_advantage
from gruppo.trainer.state import AdaptiveKL
from gruppo.types import InputFeature

Make = Callable[..., GRPOTrainer]
# Hot enough for completions of different lengths and answers.
HOT = {"temperature": 1.5, "max_new_tokens": 5}


def flat(trainer: GRPOTrainer) -> tuple[list[Any], list[int]]:
    """The rollouts of the step, and the group of each."""
    groups = trainer.kept
    return rollouts_of(trainer), [i for i, g in enumerate(groups) for _ in g.rollouts]


# --- estimators by name -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_step_has_the_advantages_that_its_estimator_gives_to_its_rollouts(name: str, make_trainer: Make) -> None:
    options: dict[str, Any] = {"k": 2} if name == "pass_at_k" else {}
    by_place: dict[str, Any] = {"rewards": ("step_rewards:by_place",), "correct_by": "by_place"}
    trainer = make_trainer(advantage=name, advantage_options=options, **by_place, **HOT)
    trainer.step()
    rollouts, ids = flat(trainer)
    lengths = [len(r.trajectory.tokens) for r in rollouts]
    assert len(set(lengths)) > 1
    rewards = [[0.0, 1 / 3, 2 / 3, 1.0][i % 4] for i in range(16)]
    # by_place gives 0, 1/3, 2/3, 1 to the four greedy completions too: they are scored in one call.
    inputs = {
        "lengths": lengths,
        "greedy_rewards": [[0.0, 1 / 3, 2 / 3, 1.0][i] for i in ids],
        "correct": [r == 1.0 for r in rewards],
    }
    options |= {"normalization": "standard"} if name in ("grpo", "rloo", "best_of_group") else {}
    estimate = ADVANTAGES[name](**options)
    wanted = (*getattr(estimate, "needs", ()), *getattr(estimate, "uses", ()))
    expected = estimate(rewards, group_ids=ids, **{n: inputs[n] for n in wanted})
    assert [r.advantage for r in rollouts] == expected.tolist()
    assert expected.abs().max() > 0.1


def trainer_indices(trainer: GRPOTrainer) -> list[int]:
    from gruppo.task.order import prompt_indices

    return prompt_indices(len(trainer.prompts.train), trainer.step_number, 4, trainer.config.seed)


def test_the_baseline_of_remax_is_the_greedy_answer_of_the_weights_that_sampled(make_trainer: Make) -> None:
    trainer = make_trainer(advantage="remax", **HOT)
    prompts = [trainer.prompts.train.prompts[i] for i in trainer_indices(trainer)]
    responses = trainer.sampler.draw(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=5))
    right = [float(r[0].text == p.columns["answer"]) for r, p in zip(responses, prompts, strict=True)]
    trainer.step()
    rollouts, ids = flat(trainer)
    assert [r.advantage for r in rollouts] == [r.reward - right[i] for r, i in zip(rollouts, ids, strict=True)]
    assert len({r.advantage for r in rollouts}) > 1


def test_gdpo_gets_the_rewards_apart_with_their_weights(make_trainer: Make) -> None:
    trainer = make_trainer(
        advantage="gdpo", rewards=("exact_match", "length_penalty"), reward_weights=(1.0, 0.5), group_size=8, **HOT
    )
    trainer.step()
    rollouts, ids = flat(trainer)
    total = [0.0] * len(rollouts)
    for name, weight in (("exact_match", 1.0), ("length_penalty", 0.5)):
        for group in set(ids):
            members = [i for i, g in enumerate(ids) if g == group]
            values = [rollouts[i].rewards[name] for i in members]
            if max(values) > min(values):
                for i, value in zip(members, values, strict=True):
                    total[i] += weight * (value - fmean(values)) / stdev(values)
    expected = [t / stdev(total) for t in total]
    assert [r.advantage for r in rollouts] == pytest.approx(expected, abs=1e-4)
    assert all(r.reward == r.rewards["exact_match"] + 0.5 * r.rewards["length_penalty"] for r in rollouts)


def test_options_reach_the_estimator() -> None:
    made = build_advantage(TrainConfig(advantage="pass_at_k", advantage_options={"k": 3}, correct_at=0.5))
    assert repr(made) == "PassAtKAdvantage(k=3, correct_at=0.5)"
    made = build_advantage(TrainConfig(advantage="grpo", advantage_options={"eps": 1e-4, "ddof": 0}))
    assert repr(made) == "GRPOAdvantage(normalization='standard', ddof=0, eps=0.0001)"
    assert repr(build_advantage(TrainConfig(normalization="centered"))).startswith("GRPOAdvantage(normalization='cent")
    assert repr(build_advantage(TrainConfig(advantage="drgrpo"))) == "DRGRPOAdvantage()"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"advantage": "gae"}, ["advantage='gae' is unknown", "grpo, rloo, drgrpo", "your.module:YourAdvantage"]),
        ({"advantage": "drgrpo", "normalization": "standard"}, ["'drgrpo' does not take normalization", "grpo, rloo"]),
        ({"advantage": "opo", "scale": "group"}, ["OPOAdvantage has scale='none'", "got 'group'"]),
        ({"advantage": "pass_at_k", "group_size": 3}, ["k=4 is more than the 3 rewards"]),
        ({"advantage": "opo", "advantage_options": {"k": 3}}, ["'opo' cannot be made with k", "unexpected keyword"]),
        ({"advantage": "nowhere:At"}, ["no module 'nowhere' for advantage 'nowhere:At'"]),
        ({"advantage": "own_advantage:WantsTheWeather"}, ["needs 'weather'", "lengths, greedy_rewards, correct"]),
        ({"advantage": "own_advantage:OneNumber"}, ["one value per reward", "got 0.0"]),
    ],
)
def test_an_estimator_that_cannot_be_used_is_refused_before_anything_is_loaded(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InputError) as error:
        build_advantage(TrainConfig(**options))
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


def test_an_estimator_of_ones_own(make_trainer: Make) -> None:
    trainer = make_trainer(
        advantage="own_advantage:PerToken", advantage_options={"factor": 3}, rewards=("step_rewards:by_place",), **HOT
    )
    trainer.step()
    rollouts, _ = flat(trainer)
    expected = [3 * ([-1 / 2, -1 / 6, 1 / 6, 1 / 2][i % 4]) / len(r.trajectory.tokens) for i, r in enumerate(rollouts)]
    assert [r.advantage for r in rollouts] == pytest.approx(expected, abs=1e-12)


def test_the_help_names_every_estimator(capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.cli.main import run

    with pytest.raises(SystemExit):
        run(["train", "--help"])
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(ADVANTAGES) <= words


def test_estimator_and_options_from_flags() -> None:
    from flags import config_of

    words = ["--advantage", "pass_at_k", "--advantage-options", "k", "2"]
    config = config_of(words)
    assert (config.advantage, config.advantage_options, config.normalization) == ("pass_at_k", {"k": 2}, None)


# --- shapes -------------------------------------------------------------------------------------------------------


def test_the_overlong_penalty_counts_from_the_runs_own_limit(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:by_place",), overlong_cache=4, truncated_factor=0.5,
                           advantage="drgrpo", temperature=3.0, max_new_tokens=5)  # fmt: skip
    metrics = trainer.step()
    rollouts, ids = flat(trainer)
    shaped = []
    for i, r in enumerate(rollouts):
        value = [0.0, 1 / 3, 2 / 3, 1.0][i % 4]
        assert r.reward == value  # what is reported is the reward itself
        value *= 0.5 if r.trajectory.stop_reason == "length" else 1.0
        shaped.append(value - {1: 0.0, 2: 0.25, 3: 0.5, 4: 0.75, 5: 1.0}[len(r.trajectory.tokens)])
    means = {g: fmean(s for s, i in zip(shaped, ids, strict=True) if i == g) for g in set(ids)}
    assert {r.trajectory.stop_reason for r in rollouts} == {"stop", "length"}
    assert [r.advantage for r in rollouts] == pytest.approx(
        [s - means[i] for s, i in zip(shaped, ids, strict=True)], abs=1e-6
    )
    assert [r.shaped for r in rollouts] == pytest.approx(shaped)
    assert (metrics["reward/mean"], metrics["reward/shaped_mean"]) == pytest.approx((0.5, fmean(shaped)))


def test_gdpo_compares_the_penalty_inside_the_column_of_the_reward_that_decides(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("length_penalty", "exact_match"), reward_weights=(0.5, 2.0), overlong_cache=4,
                           advantage="gdpo", group_size=8, temperature=1.5, max_new_tokens=5)  # fmt: skip
    trainer.step()
    rollouts, ids = flat(trainer)
    assert trainer.scorer.correct_by == "exact_match"
    rows = [
        [r.rewards["length_penalty"], r.rewards["exact_match"] - (len(r.trajectory.tokens) - 1) / 4 / 2.0]
        for r in rollouts
    ]
    expected = ADVANTAGES["gdpo"](weights=(0.5, 2.0))(rows, group_ids=ids)
    assert [r.advantage for r in rollouts] == pytest.approx(expected.tolist(), abs=1e-6)
    assert expected.abs().max() > 0.1


# --- KL in the reward ---------------------------------------------------------------------------------------------


def test_kl_in_the_reward_is_the_log_ratio_to_the_start(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:by_place",), kl_in_reward=0.7, advantage="drgrpo", lr=3e-3, **HOT)
    start = make_trainer(rewards=("step_rewards:by_place",), output=str(trainer.run.path) + "-start", **HOT)
    first = trainer.step()
    assert abs(first["reward/kl"]) < 1e-4 and first["reward/kl_coef"] == 0.7
    metrics = trainer.step()
    rollouts, ids = flat(trainer)
    features = [InputFeature(prompt_ids=r.trajectory.prompt_ids, completion_ids=r.trajectory.tokens) for r in rollouts]
    before = start.model.forward_only(features)["logps"]  # the untrained weights, scored by another model
    kls = [math.fsum(r.trajectory.logps) - math.fsum(b.tolist()) for r, b in zip(rollouts, before, strict=True)]
    assert max(map(abs, kls)) > 0.05
    assert metrics["reward/kl"] == pytest.approx(fmean(kls), abs=1e-5)
    shaped = [[0.0, 1 / 3, 2 / 3, 1.0][i % 4] - 0.7 * kl for i, kl in enumerate(kls)]
    means = {g: fmean(s for s, i in zip(shaped, ids, strict=True) if i == g) for g in set(ids)}
    expected = [s - means[i] for s, i in zip(shaped, ids, strict=True)]
    assert [r.advantage for r in rollouts] == pytest.approx(expected, abs=1e-5)


def test_with_an_adapter_the_reference_is_the_base(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:by_place",), kl_in_reward=0.7, lora=True, lr=3e-2, **HOT)
    kls = [trainer.step()["reward/kl"] for _ in range(3)]
    assert abs(kls[0]) < 1e-4 < 0.01 < max(map(abs, kls[1:]))


def test_the_controller_by_hand() -> None:
    kl = AdaptiveKL(coefficient=0.2, target=5.0, horizon=1000)
    kl.follow(5.5, completions=100)  # error 0.1: 1 + 0.1 * 0.1
    assert kl.coefficient == pytest.approx(0.202)
    kl.follow(50.0, completions=100)  # error cut to 0.2
    assert kl.coefficient == pytest.approx(0.202 * 1.02)
    kl.follow(0.0, completions=500)  # error cut to -0.2
    assert kl.coefficient == pytest.approx(0.202 * 1.02 * 0.9)
    fixed = AdaptiveKL(coefficient=0.2)
    fixed.follow(50.0, completions=100)
    assert fixed.coefficient == 0.2


def test_the_coefficient_of_a_run_follows_its_kl(make_trainer: Make) -> None:
    trainer = make_trainer(
        rewards=("step_rewards:by_place",), kl_in_reward=0.1, kl_target=0.02, kl_horizon=160, lr=3e-3, **HOT
    )
    steps = [trainer.step() for _ in range(4)]
    coefficient = 0.1
    for metrics in steps:
        assert metrics["reward/kl_coef"] == pytest.approx(coefficient, rel=1e-12)
        coefficient *= 1 + min(max(metrics["reward/kl"] / 0.02 - 1, -0.2), 0.2) * 16 / 160
    assert len({m["reward/kl_coef"] for m in steps}) == 4


# --- a reference that moves ---------------------------------------------------------------------------------------


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_the_reference_is_copied_every_so_many_steps(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:by_place",), beta=0.1, ref_every=2, lr=1e-3)
    kls = [trainer.step()["policy/kl"] for _ in range(5)]
    assert kls[0] == kls[2] == kls[4] == 0.0  # after steps 2 and 4 the policy is the reference
    assert min(kls[1], kls[3]) > 1e-6


def test_the_reference_may_be_mixed(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:by_place",), beta=0.1, ref_every=1, ref_mix=0.25, lr=1e-3)
    expected = parameters(trainer.model.model)
    for _ in range(2):
        trainer.step()
        now = parameters(trainer.model.model)
        expected = {n: 0.75 * expected[n].double() + 0.25 * now[n].double() for n in now}
    assert trainer.state.reference is not None
    for name, tensor in trainer.state.reference.state().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kl_target": 1.0}, "kl_target needs kl_in_reward above 0"),
        ({"ref_every": 5, "lora": True, "beta": 0.1, "ref_mix": 0.5}, "ref_mix=0.5 needs all weights"),
        ({"ref_every": 5}, "ref_every moves a reference that nothing uses; set beta or kl_in_reward"),
        ({"overlong_cache": 300}, "overlong_cache=300 is more than max_new_tokens=256; lower it"),
        ({"truncated_factor": 1.5}, "truncated_factor=1.5: Input should be less than or equal to 1"),
        ({"ref_mix": 0.0}, "ref_mix=0.0: Input should be greater than 0"),
        ({"dynamic_sampling": -1}, "dynamic_sampling=-1: Input should be greater than or equal to 0"),
        ({"advantage_options": {"k": [1]}}, "advantage_options.k"),
    ],
)
def test_options_that_do_not_fit_together_are_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=r"^config: ") as error:
        TrainConfig.read(values)
    assert expected in str(error.value)


def test_options_of_an_estimator_survive_yaml(tmp_path: Path) -> None:
    config = TrainConfig(advantage="gpg", advantage_options={"counted": "nonzero", "a": 2, "b": 0.5})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert TrainConfig.from_yaml(tmp_path / "run.yaml") == config


# --- a bonus that follows the entropy ---------------------------------------------------------------------------------


def test_the_entropy_bonus_of_a_run_follows_its_target(make_trainer: Make, tmp_path: Path) -> None:
    """The base has an entropy of about 0.09 per token: above a target of 0.01, below one of 1."""
    low = make_trainer(entropy_coef=0.02, entropy_target=0.01, entropy_change=0.004)
    coefs = [low.step()["policy/entropy_coef"] for _ in range(2)]
    assert coefs == [0.0, 0.0] and low.model.loss.entropy_coef == 0.0  # entropy enough, from the first step on
    assert low.state.entropy.coefficient == pytest.approx(0.012)
    high = make_trainer(entropy_coef=0.02, entropy_target=1.0, entropy_change=0.004, output=str(tmp_path / "high"))
    coefs = [high.step()["policy/entropy_coef"] for _ in range(3)]
    assert coefs == pytest.approx([0.02, 0.024, 0.028])
    assert high.model.loss.entropy_coef == pytest.approx(0.028)


def test_the_entropy_controller_goes_by_the_whole_policy_and_not_by_its_live_groups(make_trainer: Make) -> None:
    """All groups dead and no bonus: nothing is trained, and the controller still sees the entropy."""
    trainer = make_trainer(
        rewards=("step_rewards:constant",), entropy_coef=0.0, entropy_target=5.0, entropy_change=0.01
    )
    first, second = trainer.step(), trainer.step()
    assert (first["policy/entropy_coef"], second["policy/entropy_coef"]) == (0.0, 0.01)
    assert "live/entropy" not in first and 0.02 < first["rollout/entropy"] < 1.0
    assert second["policy/entropy"] > 0.0  # the bonus acts on sequences without advantage too


def test_options_of_a_loss_reach_it_and_clash_with_none_of_the_configs() -> None:
    from gruppo.loss import M2POLoss
    from gruppo.trainer.build import build_loss

    built = build_loss(TrainConfig(loss="m2po", loss_options={"threshold": 0.1}, kl_estimator="absolute", beta=0.1))
    assert repr(built) == repr(M2POLoss(threshold=0.1, kl_estimator="absolute", beta=0.1))
    with pytest.raises(InputError, match="loss_options has 'beta', which is an option of its own"):
        build_loss(TrainConfig(loss="grpo", loss_options={"beta": 0.1}))
    with pytest.raises(InputError, match="thresholt"):
        build_loss(TrainConfig(loss="m2po", loss_options={"thresholt": 0.1}))


def test_the_correction_is_the_samplers_business_unless_it_is_named() -> None:
    from gruppo.loss import MaskedWeight, TruncatedWeight
    from gruppo.trainer.build import build_loss

    assert build_loss(TrainConfig()).correction is None
    assert build_loss(TrainConfig(sampler="vllm")).correction == TruncatedWeight()
    assert build_loss(TrainConfig(sampler="vllm", correction="none")).correction is None
    assert build_loss(TrainConfig(correction="mask_sequence")).correction == MaskedWeight(level="sequence")
    # its ratio is over the sampler already: a second weight would count the gap twice
    assert build_loss(TrainConfig(sampler="vllm", loss="prime")).correction is None
    with pytest.raises(InputError, match="correction='tis' is unknown; use auto, none, truncate"):
        build_loss(TrainConfig(correction="tis"))
