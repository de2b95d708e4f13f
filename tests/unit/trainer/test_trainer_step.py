"""One step of the trainer: its numbers follow from its rollouts, and the odd cases do no harm."""

import json
import math
import re
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from step_rewards import rollouts_of

from gruppo.errors import CheckpointError, InputError, MissingExtraError, NumericError, RewardError
from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.learner import MAX_SKIPPED
from gruppo.types import InputFeature

pytestmark = pytest.mark.slow

Make = Callable[..., GRPOTrainer]
LIVE = {"rewards": ("step_rewards:by_place",)}


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.model.named_parameters()}


def unchanged(trainer: GRPOTrainer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[n]) for n, p in weights(trainer).items())


# --- the numbers of a step ----------------------------------------------------------------------------------------

KEYS = {
    "reward/mean", "reward/std", "reward/correct_frac",
    "reward/exact_match/mean", "reward/exact_match/std", "reward/exact_match/abstain_frac",
    "reward/exact_match/error_frac", "reward/exact_match/timeout_frac",
    "group/zero_std_frac", "group/dead_frac", "group/all_right_frac", "group/all_wrong_frac",
    "completion/len_mean", "completion/len_p95", "completion/truncated_frac", "completion/empty_frac",
    "rollout/entropy",
    "policy/loss", "policy/policy", "optim/grad_norm", "optim/lr", "optim/skipped",
    "live/frac", "live/policy_confidence", "live/mean_new_logp", "live/mean_old_logp", "live/logp_diff_mean",
    "live/approx_kl", "live/token_kl_max", "live/token_ratio_max", "live/entropy",
    "live/clip_ratio", "live/clip_ratio_low", "live/clip_ratio_high",
}  # fmt: skip


def test_a_step_reports_exactly_these_numbers(make_trainer: Make) -> None:
    metrics = make_trainer().step()
    assert set(metrics) == KEYS
    assert all(isinstance(v, float) and math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"beta": 0.1}, {"policy/kl"}),
        ({"entropy_coef": 0.01}, {"policy/entropy"}),
        ({"rewards": ("exact_match", "length_penalty")}, {f"reward/length_penalty/{k}" for k in ("mean", "std")}),
    ],
)
def test_options_add_their_own_numbers(options: dict[str, Any], more: set[str], make_trainer: Make) -> None:
    metrics = make_trainer(**options).step()
    assert set(metrics) >= KEYS | more


@pytest.mark.row("R-33", "the ratio of a first update")
def test_a_single_update_is_on_policy_to_the_bit(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE)
    for _ in range(2):
        metrics = trainer.step()
        assert (metrics["live/token_ratio_max"], metrics["live/clip_ratio"], metrics["live/approx_kl"]) == (
            1.0,
            0.0,
            0.0,
        )


def test_what_an_update_saw_of_each_token_is_kept_on_request(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE)
    trainer.step()
    assert all(rollout.policy_logps is None for group in trainer.recorded for rollout in group.rollouts)
    before = trainer.model.twin()
    trainer.step(record=True)
    rollouts = [rollout for group in trainer.recorded for rollout in group.rollouts if rollout.has_advantage]
    expected = before.forward_only(rollouts)
    assert len(rollouts) > 4
    for rollout, logps, entropies in zip(rollouts, expected["logps"], expected["entropies"], strict=True):
        assert rollout.policy_logps == pytest.approx(logps.tolist(), abs=1e-5)
        assert rollout.entropies == pytest.approx(entropies.tolist(), abs=1e-5)


def test_advantages_are_the_standard_scores_of_the_groups(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE)
    trainer.step()
    groups = trainer.kept
    assert len(groups) == 4
    # Rewards 0, 1/3, 2/3, 1: mean 1/2, variance (1/4 + 1/36 + 1/36 + 1/4) / 3 = 5/27.
    expected = [x / math.sqrt(5 / 27) for x in (-1 / 2, -1 / 6, 1 / 6, 1 / 2)]
    for group in groups:
        assert [r.reward for r in group.rollouts] == [0.0, 1 / 3, 2 / 3, 1.0]
        assert [r.advantage for r in group.rollouts] == pytest.approx(expected, abs=1e-6)


def test_the_loss_of_an_on_policy_step_is_minus_the_mean_advantage(make_trainer: Make) -> None:
    # At a limit of 3 tokens most answers are cut off; leaving those out makes the mean of the advantages something else
    # than 0.
    trainer = make_trainer(**LIVE, max_new_tokens=3, mask_truncated=True, temperature=3.0, normalization="centered")
    metrics = trainer.step()
    rollouts = rollouts_of(trainer)
    kept = [r.advantage for r in rollouts if not r.trajectory.is_truncated and r.trajectory.tokens]
    assert 0 < len(kept) < len(rollouts)
    assert metrics["policy/loss"] == pytest.approx(-sum(kept) / len(rollouts), abs=1e-6)
    assert abs(metrics["policy/loss"]) > 1e-4


def test_a_step_takes_the_prompts_and_seeds_of_its_number(make_trainer: Make, tmp_path: Path) -> None:
    first, second = make_trainer(), make_trainer(output=str(tmp_path / "other"), seed=1)
    first.step()
    texts = [r.trajectory.text for r in rollouts_of(first)]
    indices = [g.prompt.index for g in first.kept]
    first.step()
    assert [g.prompt.index for g in first.kept] != indices
    second.step()
    assert [g.prompt.index for g in second.kept] != indices
    assert [r.trajectory.text for r in rollouts_of(second)] != texts


def test_epochs_and_minibatches_are_optimizer_steps(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, epochs_per_batch=2, minibatches=2, warmup_steps=8, lr=8e-4)
    metrics = trainer.step()
    assert trainer.model.version == 4
    assert metrics["optim/lr"] == pytest.approx(4e-4)  # the fourth of eight warm-up steps
    assert metrics["live/token_ratio_max"] > 1.0  # old log-probs are those before the first update
    assert {s.policy_version for g in trainer.kept for r in g.rollouts for s in [r.trajectory]} == {0}


def test_old_logps_of_several_updates_are_the_trainers_before_the_first(make_trainer: Make, tmp_path: Path) -> None:
    """Two epochs by hand with the public parts give the same weights."""
    trainer = make_trainer(**LIVE, epochs_per_batch=2, minibatches=2)
    trainer.step()
    other = make_trainer(**LIVE, epochs_per_batch=2, minibatches=2, output=str(tmp_path / "other"))
    sequences = [r.trajectory for r in rollouts_of(trainer)]
    features = [InputFeature(prompt_ids=s.prompt_ids, completion_ids=s.tokens) for s in sequences]
    advantages = [r.advantage for r in rollouts_of(trainer)]
    old = other.model.forward_only(features)["logps"]
    for _ in range(2):
        for part in (slice(0, 8), slice(8, 16)):
            other.model.forward_backward(features[part], advantages=advantages[part], old_logps=old[part])
            other.model.clip_grad_and_step(1.0)
    assert unchanged(other, weights(trainer))


def test_the_kl_of_a_run_is_towards_its_start(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, beta=0.5, lr=1e-3)
    kls = [trainer.step()["policy/kl"] for _ in range(3)]
    assert kls[0] == 0.0
    assert min(kls[1:]) > 1e-5


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_minibatches_without_signal_are_steps_that_do_nothing(minibatches: int, make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:later_half",), minibatches=minibatches, epochs_per_batch=2)
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["group/zero_std_frac"] == 0.5
    assert trainer.model.version == 2 * minibatches
    assert metrics["policy/loss"] == pytest.approx(metrics["policy/policy"])
    assert not unchanged(trainer, before)


def test_abstentions_of_a_whole_step_train_nothing_and_are_said(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(rewards=("step_rewards:abstains_on_odd_steps",))
    trainer.step()
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["group/zero_std_frac"] == 1.0
    # A mean of nothing is not 0.
    assert not metrics.keys() & {"reward/mean", "reward/std", "reward/correct_frac", "optim/grad_norm"}
    assert metrics["reward/abstains_on_odd_steps/abstain_frac"] == 1.0
    assert unchanged(trainer, before)
    text = "every reward function abstained (None) on every completion"
    assert caplog.text.count(text) == 1 and text in (trainer.run.path / "events.jsonl").read_text()


def test_steps_without_any_reward_are_warned_of_once(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(rewards=("step_rewards:unsure",), steps=3)
    trainer.train()
    text = "every reward function abstained (None) on every completion"
    assert caplog.text.count(text) == 1
    assert [(e["event"], e["step"]) for e in trainer.run.events() if "text" in e] == [("no_reward", 1)]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.row("R-18", "None for all completions of ten steps")
def test_ten_steps_in_a_row_without_any_reward_end_the_run(ahead: int, make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:unsure",), steps=14, max_staleness=ahead)
    with pytest.raises(
        RewardError, match=r"10 steps in a row have no reward.*step 10:.*`gruppo reward check`"
    ) as error:
        trainer.train()
    assert error.value.exit_code == 4
    assert [m["step"] for m in trainer.run.metrics()] == list(range(1, 10))
    assert [path.name for path in (trainer.run.path / "checkpoints").iterdir()] == ["step-000009"]
    assert json.loads((trainer.run.path / "status.json").read_text())["status"] == "failed"


def test_steps_without_any_reward_that_are_not_in_a_row_do_not_end_the_run(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:abstains_on_odd_steps",), steps=21)
    trainer.train()
    rewarded = ["reward/mean" in m for m in trainer.run.metrics()]
    assert len(rewarded) == 21 and rewarded.count(False) >= 10


def test_one_reward_without_values_is_warned_of_once(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(rewards=("exact_match", "step_rewards:unsure"), steps=3)
    trainer.train()
    text = "reward 'unsure' gave None to all 16 completions of the step, so it counts for nothing"
    assert caplog.text.count(text) == 1
    [event] = [e for e in trainer.run.events() if e["event"] == "reward_abstained"]
    assert (event["step"], event["text"]) == (1, text)


def test_failures_below_the_limit_are_shown_once_and_their_traceback_is_kept(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(rewards=("exact_match", "step_rewards:fails_on_odd_answers"), steps=3, prompts_per_step=3)
    trainer.train()
    warnings = [record.message for record in caplog.records if "fails_on_odd_answers" in record.message]
    share = trainer.run.metrics()[0]["reward/fails_on_odd_answers/error_frac"]
    assert 0 < share < 1
    assert len(warnings) == 1 and "\x1b" not in warnings[0]
    expected = (
        rf"step 1: reward 'fails_on_odd_answers' failed on {12 * share:.0f} of 12 completions: ValueError: cannot read"
    )
    assert re.match(expected + r" \d+ \\x1b\[2J \(traceback in events.jsonl", warnings[0])
    [event] = [e for e in trainer.run.events() if e["event"] == "reward_failed"]
    assert event["step"] == 1
    assert event["traceback"].startswith("Traceback") and 'step_rewards.py", line' in event["traceback"]


def test_a_reward_sees_how_far_the_run_is(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:progress",), steps=4)
    epoch = 4 / len(trainer.prompts.train)  # four prompts per step
    for number in range(3):
        mean = trainer.step()["reward/mean"]
        assert mean == pytest.approx(number / 4 + 100 * number * epoch + 10_000 * 4 * epoch)


def test_the_options_of_adam_by_hand(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, lr=1e-2, adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=0.01)
    before = weights(trainer)["lm_head.weight"]
    trainer.step()
    parameter = trainer.model.model.lm_head.weight
    moments = trainer.model.optimizer.state[parameter]
    gradient = moments["exp_avg"] / (1 - 0.5)
    assert float(gradient.abs().max()) > 0.01
    torch.testing.assert_close(moments["exp_avg_sq"], (1 - 0.6) * gradient**2)
    # In the first step both means, without their bias, are of this gradient alone.
    torch.testing.assert_close(before - parameter, 1e-2 * gradient / (gradient.abs() + 0.01), atol=1e-7, rtol=1e-4)


# --- steps without signal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["grpo", "gspo", "sapo", "cispo", "bnpo", "drgrpo", "dapo"])
@pytest.mark.row("R-22", "a constant reward")
def test_a_constant_reward_leaves_the_weights_to_the_bit(loss: str, make_trainer: Make) -> None:
    # AdamW divides 0 by the root of 0 plus eps: no movement, and no NaN.
    trainer = make_trainer(rewards=("step_rewards:constant",), correct_by="constant", loss=loss)
    before = weights(trainer)
    for _ in range(2):
        metrics = trainer.step()
        # 0.7 for everybody: no signal, and nobody is right.
        assert (metrics["group/zero_std_frac"], metrics["group/all_right_frac"]) == (1.0, 0.0)
        assert (metrics["policy/loss"], metrics["optim/skipped"]) == (0.0, 0.0)
        assert "optim/grad_norm" not in metrics
        assert all(math.isfinite(v) for v in metrics.values())
    assert unchanged(trainer, before)


@pytest.mark.row("R-22", "a dead step after a live one")
def test_a_dead_step_after_a_live_one_leaves_the_optimizer_alone(make_trainer: Make) -> None:
    """No gradient at all, rather than one of zeros: AdamW does not go on with what it remembers, nor does it decay."""
    trainer = make_trainer(**LIVE, weight_decay=0.1)
    trainer.step()
    before = weights(trainer)
    state = {k: v["exp_avg"].clone() for k, v in trainer.model.optimizer.state.items()}
    trainer.scorer.score = lambda prompts, completions, **_: _constant_result(len(completions))  # type: ignore[method-assign]
    metrics = trainer.step()
    assert metrics["policy/loss"] == 0.0 and "optim/grad_norm" not in metrics
    assert unchanged(trainer, before)
    assert all(torch.equal(trainer.model.optimizer.state[k]["exp_avg"], v) for k, v in state.items())


def _constant_result(num: int) -> Any:
    from gruppo.reward import RewardResult

    return RewardResult(totals=[1.0] * num, values={}, correct=[True] * num, metrics={})


def test_a_constant_reward_with_a_kl_penalty_trains_on_the_penalty_alone(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:constant",), beta=0.5)
    before = weights(trainer)
    metrics = trainer.step()
    assert (metrics["policy/loss"], metrics["policy/kl"]) == (0.0, 0.0)
    assert unchanged(trainer, before)  # at its start the policy is the reference, where k3 has no slope
    with torch.no_grad():
        trainer.model.model.lm_head.weight.mul_(0.5)
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["policy/kl"] > 0.01
    assert metrics["policy/loss"] == pytest.approx(0.5 * metrics["policy/kl"], rel=1e-6)
    assert not unchanged(trainer, before)


@pytest.mark.parametrize("options", [{}, {"tokens_per_microbatch": 40}, {"lora": True, "minibatches": 2}])
@pytest.mark.parametrize("loss", ["grpo", "drgrpo", "luspo", "reinforce", "bnpo"])
def test_the_reported_kl_is_the_mean_over_tokens_for_every_loss(
    loss: str, options: dict[str, Any], make_trainer: Make
) -> None:
    """k3 of each token, in float64 from what the update saw, and not the loss's own sum of it."""
    trainer = make_trainer(**LIVE, **options, loss=loss, beta=0.01, lr=3e-3, temperature=3.0, max_new_tokens=6)
    for _ in range(2):
        metrics = trainer.step(record=True)
    rollouts = [rollout for group in trainer.recorded for rollout in group.rollouts]
    assert len({len(r.policy_logps or ()) for r in rollouts}) > 1
    parts = [rollouts[:8], rollouts[8:]] if "minibatches" in options else [rollouts]
    means = []
    for part in parts:
        pairs = [pair for r in part for pair in zip(r.policy_logps or (), r.ref_logps or (), strict=True)]
        means.append(sum(math.exp(ref - logp) - 1 + logp - ref for logp, ref in pairs) / len(pairs))
    assert metrics["policy/kl"] == pytest.approx(sum(means) / len(means), rel=1e-4) and metrics["policy/kl"] > 1e-5


def test_bnpo_divides_by_the_tokens_of_an_update_not_of_a_micro_batch(make_trainer: Make, tmp_path: Path) -> None:
    """DAPO's loss with GRPO's clip range is that mean, in each of two updates of several micro-batches."""
    split = {"minibatches": 2, "tokens_per_microbatch": 20, "clip_range": 0.2}
    moved = [make_trainer(**LIVE, **split, loss=loss, output=str(tmp_path / loss)) for loss in ("bnpo", "dapo")]
    norms = [trainer.step()["optim/grad_norm"] for trainer in moved]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0
    assert unchanged(moved[0], weights(moved[1]))


@pytest.mark.parametrize("loss", ["grpo", "gspo", "dapo", "bnpo", "drgrpo"])
@pytest.mark.row("R-23", "one token per completion, masked")
def test_everything_truncated_and_masked_is_loss_zero(loss: str, make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, loss=loss, max_new_tokens=1, mask_truncated=True, temperature=0.5)
    before = weights(trainer)
    metrics = trainer.step()
    assert metrics["completion/truncated_frac"] == 1.0
    assert (metrics["policy/loss"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert all(math.isfinite(v) for v in metrics.values())
    assert unchanged(trainer, before)


def test_truncated_but_not_masked_completions_train(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, max_new_tokens=1, temperature=2.0)
    before = weights(trainer)
    assert trainer.step()["optim/grad_norm"] > 0.0
    assert not unchanged(trainer, before)


@pytest.mark.row("R-24", "the end token first")
def test_empty_completions_are_one_end_token_and_the_reward_sees_nothing(make_trainer: Make) -> None:
    from gruppo.types import Trajectory

    seen: list[str] = []
    trainer = make_trainer()
    score = trainer.scorer.score
    trainer.scorer.score = lambda prompts, completions, **k: (
        seen.extend(completions) or score(prompts, completions, **k)
    )
    empty = {"tokens": (2,), "logps": (-5.0,), "text": "", "stop_reason": "stop"}
    trainer.sampler.draw = lambda prompts, num, params: [(Trajectory(prompt=p, **empty),) * num for p in prompts]
    metrics = trainer.step()
    assert seen == [""] * 16
    assert (metrics["completion/empty_frac"], metrics["completion/len_mean"], metrics["reward/mean"]) == (1.0, 1.0, 0.0)
    assert metrics["policy/loss"] == 0.0 and "optim/grad_norm" not in metrics


@pytest.mark.row("R-23", "a run of cut-off completions")
def test_a_run_that_is_all_truncated_says_so(make_trainer: Make) -> None:
    trainer = make_trainer(steps=20, max_new_tokens=1)
    trainer.train()
    events = [json.loads(line) for line in (trainer.run.path / "events.jsonl").read_text().splitlines()]
    (text,) = [e["text"] for e in events if e["event"] == "advice" and "max_new_tokens" in e["text"]]
    assert text.startswith("completion/truncated_frac is ")
    assert ", above 0.5: raise max_new_tokens, or reward shorter answers" in text


# --- steps that are not finite ------------------------------------------------------------------------------------

CULPRIT = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.row("R-29", "a hook writes NaN once")
def test_one_nan_gradient_is_skipped_and_counted(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE)
    before = weights(trainer)
    hook = trainer.model.model.get_parameter(CULPRIT).register_hook(lambda g: g * float("nan"))
    metrics = trainer.step()
    hook.remove()
    assert metrics["optim/skipped"] == 1.0 and "optim/grad_norm" not in metrics
    assert unchanged(trainer, before)
    metrics = trainer.step()
    assert metrics["optim/skipped"] == 0.0
    assert not unchanged(trainer, before)


@pytest.mark.row("R-31", "a hook multiplies all gradients by a million once")
@pytest.mark.parametrize("at", [4, 7])
def test_a_spike_is_clipped_and_leaves_an_event_with_its_step(
    at: int, make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(**LIVE, steps=9)
    hooks: list[Any] = []

    def spike(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        parameters = trainer.model.model.parameters() if step == at - 1 else ()
        hooks.extend(parameter.register_hook(lambda g: g * 1e6) for parameter in parameters)
        if step == at:
            for hook in hooks:
                hook.remove()

    trainer.callbacks.append(spike)
    trainer.train()
    norms = {m["step"]: m["optim/grad_norm"] for m in trainer.run.metrics()}
    events = [e for e in trainer.run.events() if e["event"] == "gradient_spike"]
    assert [(e["step"], e["grad_norm"]) for e in events] == [(at, norms[at])]
    assert norms[at] > 1e4 * max(norms[step] for step in norms if step != at)
    assert f"step {at}: the gradient norm is" in caplog.text and "clipped to max_grad_norm" in events[0]["text"]


@pytest.mark.row("R-31", "gradients times 1e30: each is finite, their norm is not")
def test_a_norm_that_overflows_is_skipped_and_named(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(**LIVE)
    before = weights(trainer)
    for parameter in trainer.model.model.parameters():
        parameter.register_hook(lambda g: g * 1e30)
    assert trainer.step()["optim/skipped"] == 1.0
    assert unchanged(trainer, before)
    assert "the gradient of all parameters together is not finite" in caplog.text


@pytest.mark.row("R-30", "a hook writes NaN three times")
def test_nan_gradients_in_a_row_end_the_run_with_the_weights_before_them(make_trainer: Make) -> None:
    trainer = make_trainer(**LIVE, steps=9, save_every=1)
    kept: list[dict[str, torch.Tensor]] = []

    def poison(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            kept.append(weights(trainer))
            trainer.model.model.get_parameter(CULPRIT).register_hook(lambda g: g * float("nan"))

    trainer.callbacks.append(poison)
    with pytest.raises(NumericError, match=rf"{MAX_SKIPPED} optimizer steps in a row .*first in {CULPRIT}") as error:
        trainer.train()
    assert error.value.exit_code == 3
    assert unchanged(trainer, kept[0])
    assert json.loads((trainer.run.path / "status.json").read_text())["status"] == "failed"
    assert [m["step"] for m in trainer.run.metrics()] == [1, 2, 3, 4]
    assert [m["optim/skipped"] for m in trainer.run.metrics()] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.row("R-30", "NaN in the weights")
def test_weights_that_are_nan_end_the_run_and_are_not_saved(make_trainer: Make) -> None:
    # A NaN in the head makes every log-prob NaN: the loss itself, and not only a gradient.
    trainer = make_trainer(**LIVE, steps=9)

    def poison(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            trainer.model.model.lm_head.weight[3, 3] = float("nan")

    trainer.callbacks.append(poison)
    with pytest.raises(NumericError, match="gives NaN for a token") as error:
        trainer.train()
    assert error.value.exit_code == 3
    assert not list(trainer.run.checkpoints.glob("step-*"))


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_a_run_leaves_records_a_checkpoint_and_the_model(make_trainer: Make) -> None:
    trainer = make_trainer(steps=4, save_every=2, eval_prompts=8, eval_every=2, completions_every=2)
    result = trainer.train()
    path = trainer.run.path
    assert (result.status, result.step) == ("done", 4)
    assert [m["step"] for m in result.metrics] == [0, 1, 2, 3, 4]
    assert [m["step"] for m in result.metrics if "eval/accuracy" in m] == [0, 2, 4]
    assert result.after is not None and result.metrics[-1]["eval/accuracy"] == result.after.accuracy
    assert sorted(p.name for p in (path / "completions").iterdir()) == ["step-000002.parquet", "step-000004.parquet"]
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert json.loads((path / "status.json").read_text()) == {"status": "done", "step": 4}
    assert not (path / "lock").exists()
    assert (path / "model" / "model.safetensors").is_file()


def test_only_the_newest_checkpoints_are_kept(make_trainer: Make) -> None:
    trainer = make_trainer(steps=5, save_every=1, keep_checkpoints=3)
    trainer.train()
    names = sorted(p.name for p in (trainer.run.path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004", "step-000005"]


def test_a_callback_that_returns_true_ends_the_run(make_trainer: Make) -> None:
    seen = []
    trainer = make_trainer(steps=9, callbacks=[lambda trainer, step, metrics: seen.append(step) or step == 3])
    result = trainer.train()
    assert (seen, result.step, result.status) == ([1, 2, 3], 3, "done")
    assert (trainer.run.checkpoints / "step-000003").is_dir()


def test_a_score_that_is_reached_ends_the_run(make_trainer: Make) -> None:
    trainer = make_trainer(steps=9, eval_prompts=8, eval_every=2, stop_at_score=0.0)
    assert trainer.train().step == 2


def stop_after_first(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
    """A signal during the first step."""
    if step == 1:
        trainer.stop.signal = signal.SIGTERM


def test_patience_ends_a_run_that_does_not_get_better_also_across_a_stop(make_trainer: Make) -> None:
    options: dict[str, Any] = {"steps": 9, "eval_prompts": 8, "eval_every": 1, "patience": 2, "lr": 1e-12}
    trainer = make_trainer(**options)
    assert trainer.train().step == 2  # the first score stays the best: no better one at steps 1 and 2
    ended = {"by": "patience", "steps": 9, "limit": 2}
    assert trainer.run.status() == {"status": "done", "step": 2, "ended": ended}
    stopped = make_trainer(**options, output=f"{trainer.run.path}-2", callbacks=[stop_after_first])
    assert (stopped.train().status, stopped.step_number) == ("stopped", 1)
    assert make_trainer(**options, output=f"{trainer.run.path}-2", resume=True).train().step == 2


def test_the_best_model_is_kept_beside_the_last(make_trainer: Make) -> None:
    trainer = make_trainer(steps=12, eval_prompts=40, eval_every=2, lr=3e-3, keep_best=True)
    trainer.train()
    scores = {m["step"]: m["eval/accuracy"] for m in trainer.run.metrics() if "eval/accuracy" in m}
    best = max(scores, key=lambda step: scores[step])
    assert 0 < best < 12, scores  # a learning rate at which the run overshoots
    prompts, sampler = trainer.prompts.held_out.prompts, TorchSampler(TransformersModel(str(trainer.run.best)))
    drawn = sampler.draw(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=4))
    right = [samples[0].text == prompt.columns["answer"] for samples, prompt in zip(drawn, prompts, strict=True)]
    assert sum(right) / len(right) == scores[best]
    events = [(e["step"], e["score"]) for e in trainer.run.events() if e["event"] == "best"]
    assert events[-1] == (best, scores[best]) and events == sorted(events, key=lambda event: event[1])


def test_without_prompts_to_evaluate_on_the_best_model_cannot_be_found(make_trainer: Make, tmp_path: Path) -> None:
    (tmp_path / "four.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    with pytest.raises(InputError, match=r"2 prompts leave none to evaluate on, which patience and keep_best need"):
        make_trainer(
            data=str(tmp_path / "four.jsonl"), eval_prompts=None, eval_every=1, keep_best=True, prompts_per_step=2
        )


def test_a_short_context_lowers_a_token_limit_that_was_not_set(tmp_path: Path, sums: Path) -> None:
    options: dict[str, Any] = {"data": str(sums), "output": str(tmp_path / "run"), "tensorboard": False, "threads": 1}
    trainer = GRPOTrainer(TrainConfig(**options), quiet=True)  # the embedded model has a context of 64 tokens
    trainer.close()
    assert trainer.config.max_new_tokens == 16
    assert trainer.run.config()["max_new_tokens"] == 16
    with pytest.raises(
        InputError, match=r"max_new_tokens=256 leaves no room for a prompt in the model's context of 64"
    ):
        GRPOTrainer(TrainConfig(**options | {"output": f"{tmp_path}/b", "max_new_tokens": 256}), quiet=True)
    with pytest.raises(InputError, match=r"overlong_cache=20 is more than max_new_tokens=16"):
        GRPOTrainer(TrainConfig(**options | {"output": f"{tmp_path}/c", "overlong_cache": 20}), quiet=True)


def test_an_advantage_of_another_signature_is_named(make_trainer: Make) -> None:
    with pytest.raises(
        InputError, match=r"advantage='own_advantage:WithoutGroups' cannot be called with rewards and group"
    ):
        make_trainer(advantage="own_advantage:WithoutGroups")


def test_several_processes_of_a_launcher_are_refused(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"WORLD_SIZE=2: torchrun .* each would train a run of its own"):
        make_trainer()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_trainer(steps=1).train().step == 1


def test_held_out_prompts_are_not_trained_on(make_trainer: Make) -> None:
    trainer = make_trainer(eval_prompts=40)
    held_out = {p.text for p in trainer.prompts.held_out}
    assert len(held_out) == 40
    assert not held_out & {p.text for p in trainer.prompts.train}


def test_the_tensorboard_file_holds_the_numbers_of_the_run(make_trainer: Make) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    trainer = make_trainer(steps=3, tensorboard=True)
    metrics = trainer.train().metrics
    (file,) = (trainer.run.path / "tensorboard").iterdir()
    found = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            found[event.step, value.tag] = value.tensor.float_val[0]
    assert {(m["step"], k): v for m in metrics for k, v in m.items() if k != "step"} == pytest.approx(found, rel=1e-6)


@pytest.mark.row("R-43", "not installed")
def test_a_tracker_that_is_not_installed_is_refused_and_leaves_no_trace(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"wandb=true needs 'wandb'.*pip install 'gruppo\[wandb\]'"):
        make_trainer(wandb=True)
    assert not (tmp_path / "run").exists()  # so that the next try finds its output free


def test_a_sampler_that_cannot_start_leaves_no_trace(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match="vllm"):
        make_trainer(sampler="vllm", tensorboard=True)
    assert not (tmp_path / "run").exists()  # no file of a board's either


def test_closing_twice_does_not_take_the_lock_of_the_next_owner(make_trainer: Make) -> None:
    first = make_trainer(steps=1)
    first.train()
    second = make_trainer(steps=2, resume=True)
    first.close()
    assert (second.run.path / "lock").exists()


def test_a_model_that_cannot_be_saved_is_a_run_that_failed(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(steps=1)

    def full(folder: Path) -> None:
        raise CheckpointError("disk full")

    monkeypatch.setattr(trainer.model, "save", full)
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.train()
    assert trainer.run.status() == {"status": "failed", "step": 1, "error": "CheckpointError: disk full"}
    assert trainer.run.checkpoint_steps() == [1]


# --- resuming in this process -------------------------------------------------------------------------------------

RUN = {**LIVE, "steps": 6, "save_every": 2, "eval_prompts": 6, "eval_every": 3, "lr": 1e-3, "warmup_steps": 4}


def record(trainer: GRPOTrainer) -> tuple[bytes, dict[str, torch.Tensor]]:
    return (trainer.run.path / "metrics.jsonl").read_bytes(), weights(trainer)


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, small_config_in: Callable[..., TrainConfig]
) -> tuple[bytes, dict[str, torch.Tensor]]:
    trainer = GRPOTrainer(small_config_in(tmp_path_factory.mktemp("whole"), **RUN), quiet=True)
    trainer.train()
    trainer.close()
    return record(trainer)


class Crash(BaseException):
    """A process that ends where it is: no Exception, after which a run saves what it has learned."""


def crash_at(number: int) -> Callable[..., None]:
    def callback(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == number:
            raise Crash

    return callback


@pytest.mark.parametrize("at", [3, 4, 5, 6])
def test_a_run_that_crashed_resumes_to_the_same_bits(
    at: int, make_trainer: Make, uninterrupted: tuple[bytes, dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(Crash):
        make_trainer(**RUN, callbacks=[crash_at(at)]).train()
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.step_number == (at - 1) // 2 * 2
    resumed.train()
    expected = uninterrupted
    assert record(resumed)[0] == expected[0]
    assert unchanged(resumed, expected[1])


SITES = ["first evaluation", "first sampling", "sampling", "reward", "evaluation", "update"]


@pytest.mark.parametrize("site", SITES)
def test_a_signal_anywhere_saves_and_resumes_to_the_same_bits(
    site: str,
    make_trainer: Make,
    uninterrupted: tuple[bytes, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag is raised where the run happens to be; it must be noticed, and nothing of the step lost or doubled."""
    import signal

    trainer = make_trainer(**RUN)

    def raise_flag(*_: Any) -> None:
        trainer.stop.signal = signal.SIGTERM

    def after(name: str, owner: Any, when: Callable[[], bool]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when():
                raise_flag()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    if site == "first evaluation":
        after("evaluate", trainer, lambda: trainer.step_number == 0)
    elif site == "first sampling":  # the first evaluation is recorded, no step is
        after("draw", trainer.sampler, lambda: (trainer.run.path / "metrics.jsonl").exists())
    elif site == "sampling":
        after("draw", trainer.sampler, lambda: trainer.step_number == 1)
    elif site == "reward":
        after("score", trainer.scorer, lambda: trainer.step_number == 4)
    elif site == "evaluation":  # after step 3, in which weights have moved and nothing is recorded yet
        after("evaluate", trainer, lambda: trainer.step_number == 3)
    else:
        after("update", trainer.learner, lambda: trainer.step_number == 2)
    result = trainer.train()
    assert result.status == "stopped"
    assert json.loads((trainer.run.path / "status.json").read_text())["status"] == "stopped"
    steps = {"first evaluation": 0, "first sampling": 0, "sampling": 1, "reward": 5, "evaluation": 3, "update": 3}
    expected_step = steps[site]
    assert result.step == expected_step
    monkeypatch.undo()
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.step_number == expected_step
    assert resumed.train().status == "done"
    assert record(resumed)[0] == uninterrupted[0]
    assert unchanged(resumed, uninterrupted[1])


def test_a_step_interrupted_before_its_record_is_recorded_once_whatever_follows(
    make_trainer: Make, uninterrupted: tuple[bytes, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    trainer = make_trainer(**RUN)
    evaluate = trainer.evaluate

    def interrupted() -> Any:
        if trainer.step_number == 3:
            trainer.stop.signal = signal.SIGTERM
        return evaluate()

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    assert trainer.train().step == 3
    monkeypatch.undo()
    with pytest.raises(Crash):  # the record of step 3 is written, a checkpoint after it is not
        make_trainer(**RUN, resume=True, callbacks=[crash_at(4)]).train()
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.step_number == 3
    resumed.train()
    assert record(resumed)[0] == uninterrupted[0]
    assert unchanged(resumed, uninterrupted[1])


@pytest.mark.row("R-03", "an end between record and checkpoint")
def test_a_run_killed_between_record_and_checkpoint_has_each_step_once(
    make_trainer: Make,
    uninterrupted: tuple[bytes, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is written first, the other is missing after a kill: neither order may lose or double a line."""
    from gruppo.trainer.state import Snapshots

    save = Snapshots.save
    for when in ("before", "after"):
        trainer = make_trainer(**RUN) if when == "before" else make_trainer(**RUN, resume=True)

        def dying(self: Snapshots, step: int, *more: Any, when: str = when, **facts: Any) -> None:
            if when == "after":
                save(self, step, *more, **facts)
            if step == 4:
                raise Crash
            if when == "before":
                save(self, step, *more, **facts)

        monkeypatch.setattr(Snapshots, "save", dying)
        with pytest.raises(Crash):
            trainer.train()
        monkeypatch.undo()
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.step_number == 4
    resumed.train()
    assert record(resumed)[0] == uninterrupted[0]
    assert unchanged(resumed, uninterrupted[1])


@pytest.mark.row("R-01", "a finished run resumed")
def test_a_finished_run_resumed_changes_nothing(make_trainer: Make) -> None:
    trainer = make_trainer(**RUN)
    trainer.train()
    before = record(trainer)
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.train().status == "done"
    assert record(resumed)[0] == before[0]
    assert unchanged(resumed, before[1])


def test_a_finished_run_that_goes_on_replaces_its_model(make_trainer: Make) -> None:
    from safetensors.torch import load_file

    make_trainer(**RUN).train()
    longer = make_trainer(**(RUN | {"steps": 8}), resume=True)
    assert longer.step_number == 6
    longer.train()
    assert [m["step"] for m in longer.run.metrics()] == list(range(9))
    saved = load_file(longer.run.model / "model.safetensors")
    assert all(torch.equal(saved[n], p) for n, p in weights(longer).items())
    assert longer.run.config()["steps"] == 8  # a further resume knows where it ends


def test_the_reference_of_a_resumed_run_is_that_of_its_start(make_trainer: Make, tmp_path: Path) -> None:
    run = {**RUN, "beta": 0.3}
    whole = make_trainer(**run, output=str(tmp_path / "whole"))
    whole.train()
    with pytest.raises(Crash):
        make_trainer(**run, callbacks=[crash_at(5)]).train()
    resumed = make_trainer(**run, resume=True)
    resumed.train()
    assert record(resumed)[0] == record(whole)[0]
    kls = [m["policy/kl"] for m in resumed.run.metrics()[1:]]
    assert kls[0] == 0.0 and all(a != b for a, b in pairwise(kls))
