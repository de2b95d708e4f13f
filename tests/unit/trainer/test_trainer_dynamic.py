"""Dynamic sampling: no group without signal is trained on, the bound holds, and a resumed run has the same bits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from gruppo.rollout.source import SolvedPrompts
from gruppo.task.order import prompt_indices, refill_indices
from gruppo.trainer import GRPOTrainer
from gruppo.trainer.learner import minibatch_parts
from gruppo.types import Group, Prompt, Rollout, Trajectory

pytestmark = pytest.mark.slow

Make = Callable[..., GRPOTrainer]


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.model.named_parameters()}


def same(trainer: GRPOTrainer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[n]) for n, p in weights(trainer).items())


def watch(trainer: GRPOTrainer) -> list[list[int]]:
    """The prompts of every batch that is sampled, filled in as the run goes."""
    batches: list[list[int]] = []
    sample = trainer.sampler.draw

    def sampled(prompts: Any, *args: Any) -> Any:
        batches.append([p.index for p in prompts])
        return sample(prompts, *args)

    trainer.sampler.draw = sampled  # type: ignore[method-assign]
    return batches


def counts(metrics: dict[str, float]) -> dict[str, float]:
    return {k.removeprefix("dynamic/"): v for k, v in metrics.items() if k.startswith("dynamic/")}


def test_only_groups_with_different_rewards_are_kept_and_the_step_is_filled(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=5, prompts_per_step=6)
    batches = watch(trainer)
    refilled = 0
    for _ in range(5):
        del batches[:]
        metrics = trainer.step()
        groups = trainer.kept
        assert all(len({r.reward for r in g.rollouts}) > 1 for g in groups)
        assert all(any(r.advantage for r in g.rollouts) for g in groups)
        made = counts(metrics)
        assert made["groups_kept"] == len(groups) == 6
        assert made["batches"] == len(batches) <= 5
        assert made["groups_sampled"] == sum(map(len, batches))
        assert made["groups_sampled"] == made["groups_kept"] + made["groups_dropped"] + made["groups_surplus"]
        drawn = [i for batch in batches for i in batch]
        assert len(set(drawn)) == len(drawn)  # a prompt twice in a step would give the same completions twice
        # Rewards are reported over all that was sampled, not over the selection.
        assert metrics["group/zero_std_frac"] == made["groups_dropped"] / made["groups_sampled"]
        assert metrics["group/dead_frac"] == made["groups_dropped"] / made["groups_sampled"]
        refilled += made["batches"] > 1
    assert refilled >= 3


def test_the_prompts_of_a_step_are_a_function_of_the_step(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=3, rewards=("step_rewards:constant",))
    batches = watch(trainer)
    trainer.step()
    trainer.step()
    prompts = trainer.prompts.train.prompts
    for step in range(2):
        first = prompt_indices(len(prompts), step, 4, 0)
        further = [i for i in refill_indices(len(prompts), step, 4, 0) if i not in first][:8]
        expected = [first, further[:4], further[4:]]
        assert batches[3 * step : 3 * step + 3] == [[prompts[i].index for i in batch] for batch in expected]


@pytest.mark.row("R-22", "dynamic sampling that finds nothing")
def test_the_bound_is_kept_and_a_step_without_any_signal_does_nothing(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=3, rewards=("step_rewards:constant",), minibatches=2, epochs_per_batch=2)
    batches = watch(trainer)
    before = weights(trainer)
    metrics = trainer.step()
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert counts(metrics) == {
        "batches": 3.0, "groups_sampled": 12.0, "groups_kept": 0.0, "groups_dropped": 12.0, "groups_surplus": 0.0,
    }  # fmt: skip
    assert trainer.kept == []
    assert (metrics["reward/mean"], metrics["group/zero_std_frac"]) == (pytest.approx(0.7), 1.0)
    assert metrics["policy/loss"] == 0.0 and "optim/grad_norm" not in metrics
    assert all(math.isfinite(v) for v in metrics.values())
    assert same(trainer, before)
    trainer.step()
    warned = [(e["step"], e["text"]) for e in trainer.run.events() if e["event"] == "no_signal"]
    assert warned == [(1, ANY)]  # once for a run
    assert "dynamic sampling found no group that teaches something among 12: the step changes nothing" in warned[0][1]


def test_a_bound_of_one_drops_and_does_not_refill(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=1, rewards=("step_rewards:later_half",), minibatches=4)
    before = weights(trainer)
    metrics = trainer.step()
    made = counts(metrics)
    assert (made["batches"], made["groups_kept"], made["groups_dropped"]) == (1.0, 2.0, 2.0)
    assert trainer.model.version == 4  # two minibatches of one group, two of none
    assert not same(trainer, before)


def test_groups_beyond_a_full_step_are_counted_and_left_out(make_trainer: Make) -> None:
    # The first half of every batch is dead: 2 live groups of the first batch, 1 of the 2 live ones of the second.
    trainer = make_trainer(dynamic_sampling=3, rewards=("step_rewards:later_half",), prompts_per_step=3)
    made = counts(trainer.step())
    # Of 12 completions the first 6 are dead: group 0 whole, half of group 1, which therefore differs.
    assert made == {
        "batches": 2.0, "groups_sampled": 6.0, "groups_kept": 3.0, "groups_dropped": 2.0, "groups_surplus": 1.0,
    }  # fmt: skip


def test_all_prompts_of_a_small_set_may_be_tried_and_no_more(make_trainer: Make) -> None:
    trainer = make_trainer(dynamic_sampling=1000, rewards=("step_rewards:constant",))
    batches = watch(trainer)
    trainer.step()
    assert sorted(i for batch in batches for i in batch) == sorted(p.index for p in trainer.prompts.train.prompts)


def test_dropping_dead_groups_leaves_the_gradient_of_the_live_ones(make_trainer: Make, tmp_path: Path) -> None:
    """The loss divides by what is trained on: with half of the groups dead, twice the gradient of a run that keeps
    them, which AdamW's first step does not see."""
    kept = make_trainer(rewards=("step_rewards:later_half",), max_grad_norm=1e9)
    dropped = make_trainer(
        rewards=("step_rewards:later_half",), max_grad_norm=1e9, dynamic_sampling=1, output=str(tmp_path / "other")
    )
    one, two = kept.step(), dropped.step()
    assert two["optim/grad_norm"] == pytest.approx(2 * one["optim/grad_norm"], rel=1e-4)


def group_of(num: int) -> Group:
    sequence = Trajectory(prompt=Prompt(token_ids=(1,)), tokens=(2,), logps=(-1.0,), text="", stop_reason="stop")
    return Group(prompt=Prompt(token_ids=(1,)), rollouts=(Rollout(trajectory=sequence, reward=0.0),) * num)


@pytest.mark.parametrize(
    ("sizes", "minibatches", "expected"),
    [
        ([4, 4, 4, 4], 2, [(0, 8), (8, 16)]),
        ([4, 4, 4], 2, [(0, 4), (4, 12)]),
        ([4, 3, 5], 3, [(0, 4), (4, 7), (7, 12)]),
        ([4], 3, [(0, 0), (0, 0), (0, 4)]),
        ([], 2, [(0, 0), (0, 0)]),
    ],
)
def test_minibatches_are_whole_groups(sizes: list[int], minibatches: int, expected: list[tuple[int, int]]) -> None:
    parts = minibatch_parts([group_of(num) for num in sizes], minibatches)
    assert [(p.start, p.stop) for p in parts] == expected


# --- prompts that are solved ----------------------------------------------------------------------------------------


def test_a_prompt_retires_after_so_many_solved_visits_in_a_row() -> None:
    solved = SolvedPrompts(after=2, num_prompts=10, keep=1)
    good, bad = [True, True], [True, None]
    solved.see([(3, good), (4, good)])
    solved.see([(3, bad), (4, good)])
    assert (solved.retired, solved.streak) == ({4}, {})
    solved.see([(3, good)])
    solved.see([(3, good), (5, [False, True])])
    assert solved.retired == {3, 4}
    copy = SolvedPrompts(after=2, num_prompts=10, keep=1)
    copy.load(solved.state())
    assert copy == solved


def test_nothing_retires_unless_asked() -> None:
    solved = SolvedPrompts(num_prompts=10)
    solved.see([(3, [True])])
    assert (solved.retired, solved.streak) == (set(), {})


def test_retired_prompts_are_drawn_no_more_and_enough_stay(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:right",), correct_by="right", retire_solved=1)
    batches = watch(trainer)
    total = len(trainer.prompts.train)
    steps = (total - 4) // 4 + 3  # until all but 4 have retired, and a few more
    retired = [trainer.step()["dynamic/prompts_retired"] for _ in range(steps)]
    assert retired == [min(4.0 * n, total - 4) for n in range(1, steps + 1)]
    drawn = [i for batch in batches for i in batch]
    assert all(len(batch) == 4 for batch in batches)
    assert len(set(drawn[: total - 4])) == total - 4  # nobody twice before they were all solved


def test_a_retired_prompt_is_replaced_in_first_batches_and_refills(make_trainer: Make) -> None:
    trainer = make_trainer(rewards=("step_rewards:constant",), correct_at=1.0, dynamic_sampling=2, retire_solved=9)
    batches = watch(trainer)
    indices = [p.index for p in trainer.prompts.train.prompts]
    trainer.state.solved.retired = set(indices[::2])
    for _ in range(len(indices) // 4):  # once through all of them
        trainer.step()
    drawn = [i for batch in batches for i in batch]
    assert all(len(batch) == 4 for batch in batches)
    assert set(drawn) <= set(indices[1::2]) and len(set(drawn)) > len(indices) // 4


# --- resuming -------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "steps": 8, "save_every": 2, "lr": 1e-3, "dynamic_sampling": 3, "retire_solved": 1, "kl_in_reward": 0.05,
    "kl_target": 0.02, "kl_horizon": 200, "ref_every": 3, "ref_mix": 0.5, "prompts_per_step": 8,
}  # fmt: skip


class Crash(BaseException):
    """A process that ends where it is: no Exception, after which a run saves what it has learned."""


def crash_at(number: int) -> Callable[..., None]:
    def callback(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == number:
            raise Crash

    return callback


@pytest.mark.parametrize("at", [3, 6, 7])
@pytest.mark.row("R-01", "a stop with everything to remember")
def test_a_run_with_everything_that_it_must_remember_resumes_to_the_same_bits(
    at: int, make_trainer: Make, tmp_path: Path
) -> None:
    whole = make_trainer(**RUN, output=str(tmp_path / "whole"))
    whole.train()
    assert whole.state.solved.retired and whole.state.kl.coefficient != 0.05
    assert any(m["dynamic/batches"] > 1 for m in whole.run.metrics())
    with pytest.raises(Crash):
        make_trainer(**RUN, callbacks=[crash_at(at)]).train()
    resumed = make_trainer(**RUN, resume=True)
    assert resumed.step_number == (at - 1) // 2 * 2
    resumed.train()
    assert (resumed.run.path / "metrics.jsonl").read_bytes() == (whole.run.path / "metrics.jsonl").read_bytes()
    assert same(resumed, weights(whole))
    assert resumed.state.solved == whole.state.solved


def test_a_step_that_is_stopped_while_refilling_leaves_no_trace(make_trainer: Make, tmp_path: Path) -> None:
    import signal

    whole = make_trainer(**RUN, output=str(tmp_path / "whole"))
    whole.train()
    trainer = make_trainer(**RUN)
    sample, calls = trainer.sampler.draw, []

    def stops_in_the_second_batch_of_step_4(prompts: Any, *args: Any) -> Any:
        if trainer.step_number == 3:
            calls.append(len(prompts))
        if len(calls) == 2:
            trainer.stop.signal = signal.SIGTERM
        return sample(prompts, *args)

    trainer.sampler.draw = stops_in_the_second_batch_of_step_4  # type: ignore[method-assign]
    result = trainer.train()
    assert (result.status, result.step) == ("stopped", 3)
    resumed = make_trainer(**RUN, resume=True)
    resumed.train()
    assert (resumed.run.path / "metrics.jsonl").read_bytes() == (whole.run.path / "metrics.jsonl").read_bytes()
    assert same(resumed, weights(whole))
