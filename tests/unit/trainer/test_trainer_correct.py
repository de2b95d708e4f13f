"""Which answers are right: a fact about an answer, decided before weights, penalties and KL, and read by all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from step_rewards import rollouts_of

from gruppo.doctor import summary
from gruppo.errors import InputError
from gruppo.report.page import report_page
from gruppo.reward import RewardScorer, load_reward
from gruppo.trainer import GRPOTrainer
from gruppo.trainer.trainer import TrainResult

Make = Callable[..., GRPOTrainer]
HELD_OUT = {"eval_data": "builtin:carries?split=heldout", "eval_prompts": 128}
GREEDY = 71 / 128
"""Of the first 128 held-out sums, by `greedy_accuracy`, which knows no reward."""
HOT = {"temperature": 1.5, "max_new_tokens": 5}


def rate(trainer: GRPOTrainer, name: str = "exact_match") -> float:
    rollouts = rollouts_of(trainer)
    return sum(r.rewards[name] == 1.0 for r in rollouts) / len(rollouts)


# --- which reward decides ---------------------------------------------------------------------------------------------


def test_the_first_verifier_decides_wherever_it_stands() -> None:
    def form(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    plain = load_reward(form, isolated=False)
    with RewardScorer([plain, "number_match", "exact_match"]) as scorer:
        assert scorer.correct_by == "number_match"
    with RewardScorer([plain]) as scorer:
        assert scorer.correct_by is None
        result = scorer.score(["p"] * 2, ["4", "5"])
        assert result.correct == [None, None] and "reward/correct_frac" not in result.metrics
    with RewardScorer([plain], correct_at=0.5) as scorer:  # a threshold of the only reward
        assert scorer.correct_by == "form"
    with RewardScorer(["exact_match", "number_match"], correct_by="number_match") as scorer:
        result = scorer.score(["p"] * 3, ["4", "4.0", "5"], columns={"answer": ["4"] * 3})
        assert result.correct == [True, True, False]
        assert result.metrics["reward/correct_frac"] == pytest.approx(2 / 3)
    with pytest.raises(InputError, match="correct_by='math' is not one of the rewards; they are exact_match"):
        RewardScorer(["exact_match"], correct_by="math")
    with pytest.raises(InputError, match=r"correct_at=0.5 needs a reward that decides .* none of form, other is a ver"):
        RewardScorer([plain, load_reward(form, name="other", isolated=False)], correct_at=0.5)


@pytest.mark.parametrize("option", [{"eval_samples": 4}, {"retire_solved": 2}])
def test_options_that_need_a_right_answer_are_refused_where_none_is_known(option: Any, make_trainer: Make) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(InputError, match=f"{name}={value} cannot be used here: no reward decides which answers are ri"):
        make_trainer(**{"rewards": ("step_rewards:by_place",), "eval_prompts": 8} | option)


def test_an_estimator_of_right_answers_is_refused_for_several_rewards_of_which_none_decides(make_trainer: Make) -> None:
    options: dict[str, Any] = {"rewards": ("step_rewards:by_place", "step_rewards:right")}
    with pytest.raises(InputError, match="advantage='pass_at_k' compares right answers with wrong ones, and no reward"):
        make_trainer(advantage="pass_at_k", **options)
    trainer = make_trainer(advantage="pass_at_k", correct_by="by_place", **options)
    assert trainer.scorer.correct_by == "by_place"


def test_without_a_verifier_the_held_out_score_is_a_reward_everywhere(make_trainer: Make) -> None:
    """Rewards of 0, 1/3, 2/3, 1 in turn: 0.5 on eight prompts, with a spread of 0.398 (ddof 1)."""
    options: dict[str, Any] = {"rewards": ("step_rewards:by_place",), "eval_prompts": 8, "eval_every": 1, "lr": 1e-12}
    trainer = make_trainer(steps=4, patience=2, keep_best=True, stop_at_score=0.6, **options)
    result = trainer.train()
    assert repr(result).endswith("held-out reward 0.500 -> 0.500)") and "accuracy" not in repr(result)
    assert result.step == 2  # two evaluations that were no better than the first
    assert result.after is not None and result.after.accuracy is None and result.after.score == 0.5
    scores = [{k: v for k, v in line.items() if k.startswith("eval/")} for line in trainer.run.metrics()]
    assert [sorted(each) for each in scores] == [["eval/reward", "eval/reward_high", "eval/reward_low"]] * 3
    half = 1.959964 * 0.39840953644479793 / 8**0.5
    assert scores[0]["eval/reward_high"] == pytest.approx(0.5 + half, rel=1e-6)
    assert not any("correct_frac" in key or "all_right" in key for line in trainer.run.metrics() for key in line)
    assert not [event for event in trainer.run.events() if event["event"] == "best"]
    page = report_page([trainer.run], states=[summary(trainer.run)[0]])
    assert "held-out reward" in page and "held-out accuracy" not in page.split('id="data"')[1].split("</script>")[0]


def test_a_run_stops_at_a_held_out_reward_and_keeps_the_best_by_it(make_trainer: Make) -> None:
    options: dict[str, Any] = {"rewards": ("step_rewards:by_place",), "eval_prompts": 8, "eval_every": 1}
    trainer = make_trainer(steps=4, stop_at_score=0.5, keep_best=True, **options)
    assert trainer.train().step == 1


def test_the_plan_names_the_reward_that_decides(make_trainer: Make) -> None:
    decided = make_trainer(rewards=("step_rewards:right", "exact_match"))
    assert (
        decided.plan()
        .lines(decided.config)[-1]
        .endswith("rewards step_rewards:right, exact_match; an answer is right where exact_match is at least 1")
    )
    decided.close()
    both = ("step_rewards:right", "step_rewards:by_place")
    undecided = make_trainer(rewards=both, output=f"{decided.run.path}-2")
    assert (
        undecided.plan()
        .lines(undecided.config)[-1]
        .endswith("; no reward decides which answers are right (correct_by names one)")
    )


def test_an_abstention_is_neither_right_nor_wrong() -> None:
    with RewardScorer(["exact_match"]) as scorer:
        result = scorer.score(["p"] * 3, ["4", "5", "6"], columns={"answer": ["4", "4", None]})
    assert result.correct == [True, False, None]
    assert result.metrics["reward/correct_frac"] == 0.5


def test_the_accuracy_that_these_tests_expect_is_that_of_the_model() -> None:
    from gruppo.model import TransformersModel
    from gruppo.task.builtin import greedy_accuracy
    from gruppo.task.carries import carries_rows

    model = TransformersModel("builtin")
    assert greedy_accuracy(model.model, model.tokenizer, carries_rows("heldout")[:128]) == GREEDY


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "rewards": ("exact_match", "step_rewards:right")
        },  # a format reward of weight 1: the sum is 1 for wrong answers
        {"rewards": ("step_rewards:right", "exact_match"), "reward_weights": (2.0, 1.0)},
        {"reward_weights": (0.9,)},  # the sum is never 1
        {"reward_weights": (0.0,)},
    ],
)
def test_held_out_accuracy_does_not_depend_on_weights_or_other_rewards(options: Any, make_trainer: Make) -> None:
    trainer = make_trainer(**HELD_OUT, eval_samples=2, **options)
    metrics = trainer.evaluate().metrics
    plain = make_trainer(**HELD_OUT, eval_samples=2, output=str(trainer.run.path) + "-plain").evaluate().metrics
    accuracies = {k: v for k, v in metrics.items() if not k.startswith("eval/reward")}
    assert accuracies == {k: v for k, v in plain.items() if not k.startswith("eval/reward")}
    assert metrics["eval/accuracy"] == GREEDY


def test_correct_at_is_a_threshold_on_the_deciding_reward_alone(make_trainer: Make) -> None:
    trainer = make_trainer(
        rewards=("step_rewards:by_place", "exact_match"), correct_by="by_place", correct_at=0.5, reward_weights=(0.1, 5)
    )
    metrics = trainer.step()
    assert [r.correct for r in rollouts_of(trainer)] == [False, False, True, True] * 4
    assert metrics["reward/correct_frac"] == 0.5


# --- what reads it ----------------------------------------------------------------------------------------------------


def test_prompts_retire_by_their_answers_and_not_by_their_sums(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("exact_match", "step_rewards:right"), retire_solved=1, prompts_per_step=8)
    for _ in range(4):
        trainer.step()
        solved = {g.prompt.index for g in trainer.kept if all(r.rewards["exact_match"] == 1 for r in g.rollouts)}
        assert solved <= trainer.state.solved.retired
        others = {g.prompt.index for g in trainer.kept} - solved
        assert not others & trainer.state.solved.retired
    assert 0 < len(trainer.state.solved.retired) < 32


def test_groups_that_are_all_right_are_counted_by_their_answers(make_trainer: Make) -> None:
    # All wrong with 0.7 each: equal rewards, and nobody is right.
    metrics = make_trainer(rewards=("step_rewards:constant",), correct_by="constant").step()
    assert (metrics["group/all_right_frac"], metrics["group/all_wrong_frac"]) == (0.0, 1.0)


def test_a_run_does_not_stop_at_a_score_that_a_format_reward_gives(make_trainer: Make) -> None:
    trainer = make_trainer(
        rewards=("exact_match", "step_rewards:right"), stop_at_score=0.9, steps=2, eval_every=1, **HELD_OUT
    )
    assert trainer.train().step == 2


@pytest.mark.parametrize("name", ["pass_at_k", "lead", "beta_norm", "maxrl", "length_shaped"])
@pytest.mark.parametrize("change", [{"kl_in_reward": 0.001}, {"overlong_cache": 4}], ids=["kl", "overlong"])
def test_estimators_of_success_learn_with_penalties_in_the_reward(name: str, change: Any, make_trainer: Make) -> None:
    options = {"advantage": name, "advantage_options": {"k": 2} if name == "pass_at_k" else {}, "group_size": 8}
    trainer = make_trainer(**options, **change, **HOT, lr=1e-3, prompts_per_step=8)
    for _ in range(3):
        trainer.step()
        right = [r for r in rollouts_of(trainer) if r.correct]
        assert len(right) > 5 and [r.rewards["exact_match"] for r in right] == [1.0] * len(right)
        mixed = [g for g in trainer.kept if 2 <= sum(r.correct for r in g.rollouts) <= 5]
        assert mixed
        for group in mixed:
            mean = {
                flag: sum(r.advantage for r in group.rollouts if r.correct is flag)
                / sum(r.correct is flag for r in group.rollouts)
                for flag in (True, False)
            }
            assert mean[True] > mean[False]


# --- KL in the reward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.05, 0.5])
@pytest.mark.parametrize("lora", [False, True])
def test_equal_rewards_get_exactly_nothing_while_the_policy_is_the_reference(
    coefficient: float, lora: bool, make_trainer: Make
) -> None:
    trainer = make_trainer(rewards=("step_rewards:constant",), kl_in_reward=coefficient, lora=lora, **HOT)
    metrics = trainer.step()
    assert {r.advantage for r in rollouts_of(trainer)} == {0.0}
    assert (metrics["reward/kl"], metrics["group/dead_frac"], metrics["group/zero_std_frac"]) == (0.0, 1.0, 1.0)


# --- one population per metric ----------------------------------------------------------------------------------------


def test_reward_metrics_cover_everything_that_dynamic_sampling_drew(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=3, prompts_per_step=6, group_size=4)
    for _ in range(4):
        metrics = trainer.step()
        rollouts = [r for g in trainer.groups for r in g.rollouts]
        mean = sum(r.reward for r in rollouts) / len(rollouts)
        assert metrics["reward/mean"] == metrics["reward/exact_match/mean"] == pytest.approx(mean)
        assert metrics["reward/correct_frac"] == pytest.approx(mean)
        dead = sum(len({r.reward for r in g.rollouts}) == 1 for g in trainer.groups)
        assert metrics["group/zero_std_frac"] == dead / len(trainer.groups)
        lengths = [len(r.trajectory.tokens) for r in rollouts]
        assert metrics["completion/len_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert any(g.status == "surplus" for g in trainer.groups) or metrics["dynamic/groups_surplus"] == 0


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"entropy_coef": 1e-9}, {"epochs_per_batch": 2}])
def test_live_metrics_cover_the_same_sequences_whatever_the_options(options: Any, make_trainer: Make) -> None:
    """Half of the groups is dead. With a KL penalty or a bonus they are computed too, and still not counted."""
    trainer = make_trainer(rewards=("step_rewards:later_half",), lr=1e-9, **options, **HOT)
    metrics = trainer.step()
    live = [r for r in rollouts_of(trainer) if r.advantage]
    assert metrics["live/frac"] == len(live) / len(rollouts_of(trainer)) == 8 / 16
    logps = [x for r in live for x in r.trajectory.logps]
    assert metrics["live/mean_new_logp"] == pytest.approx(sum(logps) / len(logps), abs=1e-5)
    entropies = [x for r in live for x in r.trajectory.entropies]
    assert metrics["live/entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)
    everything = [x for r in rollouts_of(trainer) for x in r.trajectory.entropies]
    assert metrics["rollout/entropy"] == pytest.approx(sum(everything) / len(everything), abs=1e-9)


def test_the_gradient_norm_is_that_of_updates_that_had_a_gradient(make_trainer: Make) -> None:
    """Four updates of one group each, of which the first two are dead."""
    trainer = make_trainer(rewards=("step_rewards:later_half",), minibatches=4, lr=1e-12, max_grad_norm=1e9)
    norms: list[float | None] = []
    step = trainer.model.clip_grad_and_step
    trainer.model.clip_grad_and_step = lambda norm: norms.append((r := step(norm)).grad_norm) or r  # type: ignore
    metrics = trainer.step()
    there = [n for n in norms if n is not None]
    assert norms[0] is None and 2 <= len(there) < 4
    assert metrics["optim/grad_norm"] == pytest.approx(sum(there) / len(there))


def test_the_gap_to_the_sampler_is_not_the_policys_own_move_and_covers_dead_sequences(make_trainer: Make) -> None:
    """A sampler whose log-probs are off by 0.1 on every token, and four updates that move the policy far."""
    trainer = make_trainer(rewards=("step_rewards:later_half",), epochs_per_batch=2, minibatches=2, lr=3e-3, **HOT)
    sampler, sample = trainer.sampler, trainer.sampler.draw
    trainer.model.measures_gap = True
    from dataclasses import replace

    def shifted(*args: Any) -> Any:
        return [tuple(replace(t, logps=tuple(x - 0.1 for x in t.logps)) for t in drawn) for drawn in sample(*args)]

    sampler.draw = shifted  # type: ignore[method-assign]
    metrics = trainer.step()
    assert metrics["live/token_ratio_max"] > 1.2  # it did move
    assert metrics["sampler/logp_gap_mean"] == pytest.approx(0.1, abs=1e-4)
    assert metrics["sampler/logp_gap_max"] == pytest.approx(0.1, abs=1e-4)
    counted: list[int] = []
    add = trainer.model.mismatch.add

    def count(inputs: Any) -> None:
        counted.append(len(inputs.logps))
        add(inputs)

    trainer.model.mismatch.add = count  # type: ignore[method-assign]
    trainer.step()
    tokens = sum(len(r.trajectory.tokens) for r in rollouts_of(trainer))
    assert sum(counted) == 2 * tokens  # all of them, in each of two epochs


def test_a_sampler_that_is_the_trainer_reports_no_gap(make_trainer: Make) -> None:
    assert not [key for key in make_trainer().step() if key.startswith("sampler/")]


def test_rejected_tokens_are_reported(make_trainer: Make) -> None:
    trainer = make_trainer(
        rewards=("step_rewards:by_place",), loss="dppo_tv", loss_options={"region": 1e-6}, epochs_per_batch=2, lr=3e-3
    )
    metrics = trainer.step()
    # Nothing has moved in the first pass; in the second nearly every token has, half of them the way they are pushed.
    assert 0.1 < metrics["live/rejected_frac"] < 0.5
    assert "live/rejected_frac" not in make_trainer(output=str(trainer.run.path) + "-2").step()


# --- what rewards log -------------------------------------------------------------------------------------------------


def test_logged_columns_and_tolerated_failures_reach_the_run_directory(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("exact_match", "step_rewards:logs_and_sometimes_fails"), completions_every=1)
    trainer._take_step(TrainResult(0))
    trainer.recorder.flush()
    rows = pq.read_table(trainer.run.path / "completions" / "step-000001.parquet").to_pylist()
    assert [r["extra/first_letter"] for r in rows] == [
        None if r["error/logs_and_sometimes_fails"] else r["completion"][:1] for r in rows
    ]
    failed = [r for r in rows if r["error/logs_and_sometimes_fails"]]
    assert 0 < len(failed) < len(rows)
    for row in failed:
        assert row["completion"].endswith("2") and row["reward/logs_and_sometimes_fails"] is None
        assert row["error/logs_and_sometimes_fails"].endswith("ValueError: I do not like 2")
        assert "step_rewards.py" in row["error/logs_and_sometimes_fails"]


def test_groups_that_are_left_out_are_in_the_file_of_completions_too(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=2, rewards=("step_rewards:later_half",), completions_every=1)
    trainer._take_step(TrainResult(0))
    (metrics,) = trainer.run.metrics()
    trainer.recorder.flush()
    rows = pq.read_table(trainer.run.path / "completions" / "step-000001.parquet").to_pylist()
    counts = {s: sum(r["status"] == s for r in rows) / 4 for s in ("kept", "no_signal", "surplus")}
    assert counts == {
        "kept": metrics["dynamic/groups_kept"],
        "no_signal": metrics["dynamic/groups_dropped"],
        "surplus": metrics["dynamic/groups_surplus"],
    }
    assert counts["no_signal"] > 0


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(make_trainer: Make, tmp_path: Path) -> Path:
    """An adapter of rank 3 that has learned something, with its log-probs on record."""
    trainer = make_trainer(rewards=("step_rewards:by_place",), lora=True, lora_rank=3, lr=3e-2, steps=3, **HOT,
                           output=str(tmp_path / "first"))  # fmt: skip
    trainer.train()
    return tmp_path / "first" / "model"


@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_with_an_adapter_goes_on_with_it(lora: bool, adapter: Path, make_trainer: Make) -> None:
    from gruppo.model import TransformersModel
    from gruppo.types import InputFeature

    features = [InputFeature(prompt_ids=(1, 8, 11, 14, 12, 9, 15), completion_ids=(5, 4, 6))]
    expected = TransformersModel(str(adapter)).forward_only(features)["logps"][0].tolist()
    base = TransformersModel("builtin").forward_only(features)["logps"][0].tolist()
    assert max(abs(a - b) for a, b in zip(expected, base, strict=True)) > 1e-3
    trainer = make_trainer(model=str(adapter), lora=lora, beta=0.5, rewards=("step_rewards:by_place",), lr=3e-2)
    assert trainer.model.forward_only(features)["logps"][0].tolist() == expected
    assert trainer.model.lora is not None and trainer.model.lora.rank == 3
    # The reference is the model at the start, as the help says, and not the bare base.
    first, second = trainer.step(), trainer.step()
    assert first["policy/kl"] == 0.0 and second["policy/kl"] > 1e-4
    assert trainer.model.reference_logps(features)[0].tolist() == expected


def test_options_of_a_new_adapter_are_refused_where_a_folder_brings_one(adapter: Path, make_trainer: Make) -> None:
    with pytest.raises(InputError, match=r"lora_rank=8 is for a new adapter, and model .* holds one already"):
        make_trainer(model=str(adapter), lora=True, lora_rank=8)
    with pytest.raises(InputError, match="lora_rank=8 is for an adapter, and lora is off; set lora=true"):
        make_trainer(lora_rank=8)


def test_a_second_adapter_on_an_adapted_model_is_refused(adapter: Path) -> None:
    from gruppo.model import LoraSpec, TransformersModel

    with pytest.raises(InputError, match=r"carries an adapter already \(rank 3, alpha 16, on .*q_proj"):
        TransformersModel(str(adapter), lora=LoraSpec(rank=2))
    peft = pytest.importorskip("peft")
    with pytest.raises(InputError, match="lora must be a LoraSpec"):
        TransformersModel("builtin", lora=peft.LoraConfig())


def test_a_run_on_an_adapter_resumes_with_the_reference_of_its_start(
    adapter: Path, make_trainer: Make, tmp_path: Path
) -> None:
    options = dict(model=str(adapter), lora=True, beta=0.5, rewards=("step_rewards:by_place",), lr=3e-2, save_every=1)
    whole = make_trainer(**options, steps=4, output=str(tmp_path / "whole"))
    whole.train()
    make_trainer(**options, steps=2, output=str(tmp_path / "part")).train()
    resumed = make_trainer(**options, steps=4, output=str(tmp_path / "part"), resume=True)
    resumed.train()
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "part")]
    assert [json.loads(x)["policy/kl"] for x in lines[0]] == [json.loads(x)["policy/kl"] for x in lines[1]]


def test_the_reference_of_an_adapter_can_be_moved_and_resumed(make_trainer: Make, tmp_path: Path) -> None:
    options = dict(lora=True, beta=0.5, ref_every=2, rewards=("step_rewards:by_place",), lr=3e-2, save_every=1)
    whole = make_trainer(**options, steps=5, output=str(tmp_path / "whole"))
    kls = [m["policy/kl"] for m in whole.train().metrics]
    assert kls[0] == kls[2] == kls[4] == 0.0 and min(kls[1], kls[3]) > 1e-6
    make_trainer(**options, steps=3, output=str(tmp_path / "part")).train()
    resumed = make_trainer(**options, steps=5, output=str(tmp_path / "part"), resume=True)
    assert [m["policy/kl"] for m in resumed.train().metrics] == kls
