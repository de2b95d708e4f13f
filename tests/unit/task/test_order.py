"""The order of prompts is a function of the step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.errors import InputError
from gruppo.task.order import _epoch_order, prompt_indices, refill_indices

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_each_epoch_visits_every_prompt_exactly_once(size: tuple[int, int], seed: int) -> None:
    num_prompts, per_step = size
    epochs = 4
    steps = -(-epochs * num_prompts // per_step)
    line = [index for step in range(steps) for index in prompt_indices(num_prompts, step, per_step, seed)]
    for epoch in range(epochs):
        assert sorted(line[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


def test_no_step_has_a_prompt_twice() -> None:
    # All small sizes and not random ones: what can go wrong needs a step across a border, and luck to be seen.
    for num_prompts in range(1, 21):
        for per_step in range(1, num_prompts + 1):
            for step in range(5 * num_prompts // per_step):
                indices = prompt_indices(num_prompts, step, per_step, seed=num_prompts)
                assert len(indices) == per_step == len(set(indices)), (num_prompts, per_step, step)


def test_a_step_far_into_a_small_set_has_no_prompt_twice() -> None:
    # 7 prompts, 5 a step: the orders of neighbouring epochs depend on each other.
    assert all(len(set(prompt_indices(7, step, 5, seed=0))) == 5 for step in range(10_000, 10_050))


@given(sizes, st.integers(0, 2**40), st.permutations(range(25)))
@settings(max_examples=40, deadline=None)
def test_a_step_does_not_depend_on_the_steps_asked_for_before(
    size: tuple[int, int], seed: int, steps: list[int]
) -> None:
    num_prompts, per_step = size
    _epoch_order.cache_clear()
    in_order = [prompt_indices(num_prompts, step, per_step, seed) for step in range(25)]
    for step in steps:
        _epoch_order.cache_clear()  # as after a restart
        assert prompt_indices(num_prompts, step, per_step, seed) == in_order[step]


def test_the_order_is_fixed_for_all_versions() -> None:
    assert [prompt_indices(5, step, 2, seed=0) for step in range(5)] == [[2, 0], [4, 3], [1, 3], [4, 0], [2, 1]]


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(prompt_indices(50, epoch, 50, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_orders_are_evenly_spread() -> None:
    # Over 3,000 seeds each of 6 prompts should come first 500 times; 100 is more than 4 standard deviations.
    firsts = [prompt_indices(6, 0, 1, seed)[0] for seed in range(3000)]
    assert all(abs(firsts.count(index) - 500) < 100 for index in range(6))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 0, 1, 0), "num_prompts >= 1"),
        ((5, -1, 1, 0), "step >= 0"),
        ((5, 0, 0, 0), "prompts_per_step >= 1"),
        ((5, 0, 6, 0), "prompts_per_step=6 is more than the 5 prompts there are"),
        ((5, 0, 1, -1), "seed must not be negative"),
    ],
)
def test_impossible_numbers_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompt_indices(*arguments)


def test_without_shuffling_prompts_come_in_their_order_and_a_step_runs_on_into_the_next_pass() -> None:
    line = [index for step in range(5) for index in prompt_indices(7, step, 3, seed=9, shuffled=False)]
    assert line == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0]
    assert refill_indices(7, 1, 3, seed=9, shuffled=False) == [6, 0, 1, 2, 3, 4, 5]
