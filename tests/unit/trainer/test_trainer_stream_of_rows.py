"""Data that is a stream: as many rows are read as the run can use, in their order, and the rest never."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gruppo.errors import InputError
from gruppo.task import read_rows
from gruppo.trainer import GRPOTrainer, TrainConfig

Config = Callable[..., TrainConfig]


def row(number: int) -> dict[str, str]:
    return {"prompt": f"{number // 100 % 100:02}+{number % 100:02}=", "answer": f"{number // 100 + number % 100:03}"}


class Endless:
    """An iterable without an end, which counts what is read of it."""

    def __init__(self, first: int = 0) -> None:
        self.first, self.num_read = first, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in itertools.count(self.first):
            self.num_read += 1
            yield row(number)


@pytest.mark.parametrize(
    ("options", "num_read"),
    [
        ({"steps": 3}, 12),
        ({"steps": 3, "eval_prompts": 5}, 17),
        ({"steps": 3, "dynamic_sampling": 2}, 16),  # the last step takes its own batch and the one after
        ({"steps": 3, "eval_prompts": None}, 15),  # a fifth of what is read
        ({"steps": 200, "eval_prompts": None}, 928),
    ],
)
def test_an_endless_stream_is_read_as_far_as_the_run_can_use_it(
    small_config: Config, options: dict[str, Any], num_read: int
) -> None:
    stream = Endless()
    config = small_config(**options)
    trainer = GRPOTrainer(config, data=stream, quiet=True)
    trainer.close()
    assert stream.num_read == num_read
    held_out = [prompt.index for prompt in trainer.prompts.held_out]
    assert held_out == [*range(num_read - len(trainer.prompts.train))]
    assert [prompt.index for prompt in trainer.prompts.train] == [*range(len(held_out), num_read)]
    assert f"the first {num_read} rows of the stream are read" in trainer.plan().lines(trainer.config)[0]
    assert trainer.config.shuffle is False


def test_a_run_takes_the_rows_of_a_stream_in_their_order(small_config: Config) -> None:
    seen: list[str] = []
    GRPOTrainer(
        small_config(),
        data=(row(number) for number in itertools.count()),
        callbacks=[lambda t, step, metrics: seen.extend(str(g.prompt.source) for g in t.groups)],
        quiet=True,
    ).train()
    assert seen == [row(number)["prompt"] for number in range(12)]


def test_a_streamed_data_set_of_the_datasets_library_is_one_and_so_may_be_the_evaluation(small_config: Config) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.IterableDataset.from_generator(lambda: (row(number) for number in itertools.count()))
    held_out = Endless(first=500)
    trainer = GRPOTrainer(
        small_config(eval_prompts=6), data=made.filter(lambda r: r["prompt"] > "00+02="), eval_data=held_out, quiet=True
    )
    trainer.close()
    assert [p.source for p in trainer.prompts.train][:2] == ["00+03=", "00+04="] and len(trainer.prompts.train) == 12
    assert held_out.num_read == len(trainer.prompts.held_out) == 6


def test_a_stream_that_ends_early_repeats(small_config: Config) -> None:
    seen: list[int] = []
    trainer = GRPOTrainer(
        small_config(),
        data=itertools.islice(Endless(), 7),
        callbacks=[lambda t, step, metrics: seen.extend(g.prompt.index for g in t.groups)],
        quiet=True,
    )
    trainer.train()
    assert seen == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    with pytest.raises(InputError, match=r"The data set is empty\."):
        GRPOTrainer(small_config(), data=iter([]), quiet=True)


def test_a_run_goes_on_with_the_same_stream_and_with_no_other(small_config: Config) -> None:
    config = small_config(steps=2)
    GRPOTrainer(config, data=Endless(), quiet=True).train()
    again = GRPOTrainer(TrainConfig.of_run(config.output), data=Endless(), resume=True, quiet=True)
    again.close()
    assert again.step_number == 2
    with pytest.raises(InputError, match="prompts to train on"):
        GRPOTrainer(config, data=Endless(first=1), resume=True, quiet=True)
    more = TrainConfig.of_run(config.output, {"steps": 3})
    with pytest.raises(InputError, match="unless data is a stream, of which more steps read more rows"):
        GRPOTrainer(more, data=Endless(), resume=True, quiet=True)
    seen: list[int] = []
    GRPOTrainer(
        more,
        data=Endless(),
        resume=True,
        accept_changes=True,
        callbacks=[lambda t, step, metrics: seen.extend(g.prompt.index for g in t.groups)],
        quiet=True,
    ).train()
    assert seen == [8, 9, 10, 11]


def test_what_a_stream_cannot_do_is_refused_before_a_row_is_read(small_config: Config) -> None:
    stream = Endless()
    with pytest.raises(InputError, match="leave shuffle out, and shuffle the stream itself"):
        GRPOTrainer(small_config(shuffle=True), data=stream, quiet=True)
    without_steps = small_config().model_dump(exclude_unset=True, exclude={"steps"})
    with pytest.raises(InputError, match="epochs=2 needs the number of prompts"):
        GRPOTrainer(TrainConfig(**without_steps, epochs=2), data=stream, quiet=True)
    with pytest.raises(InputError, match="got Endless; give a list of as many of its rows as you need"):
        read_rows(stream)
    assert stream.num_read == 0


def test_a_generator_that_was_read_from_is_refused(small_config: Config) -> None:
    """A cell of a notebook that failed and runs again would train on other rows."""
    rows = (row(number) for number in itertools.count())
    next(rows)
    with pytest.raises(InputError, match="was read from before, and cannot start again; make a new one"):
        GRPOTrainer(small_config(), data=rows, quiet=True)
