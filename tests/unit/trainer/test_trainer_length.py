"""How long a run trains, by epochs, and in which order it visits its prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gruppo.errors import InputError
from gruppo.trainer import GRPOTrainer, TrainConfig

Make = Callable[..., GRPOTrainer]
ROWS = [{"prompt": f"{i:02}+01=", "answer": f"{i + 1:03}"} for i in range(22)]


@pytest.fixture
def rows_file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture
def long_config(small_config: Callable[..., TrainConfig], rows_file: str) -> Callable[..., TrainConfig]:
    def make(**changes: object) -> TrainConfig:
        given = small_config(data=rows_file).model_dump(exclude_unset=True, exclude={"steps"}) | changes
        return TrainConfig(**given)

    return make


@pytest.mark.parametrize(
    ("epochs", "held_out", "steps"),
    # 22 or 20 prompts, 4 a step: 22/4 = 5.5, 44/4 = 11, 20/4 = 5 exactly, 0.1 x 20 = 2 prompts, 0.3 x 20 / 4 = 1.5
    [(1, 0, 6), (2, 0, 11), (1.0, 2, 5), (0.1, 2, 1), (0.3, 2, 2), (0.001, 0, 1)],
)
def test_epochs_are_passes_over_the_prompts_that_are_trained_on(
    long_config: Callable[..., TrainConfig], epochs: float, held_out: int, steps: int
) -> None:
    with_epochs = GRPOTrainer(long_config(epochs=epochs, eval_prompts=held_out), quiet=True)
    with_epochs.close()
    assert (with_epochs.config.steps, with_epochs.config.epochs) == (steps, None)
    assert with_epochs.scorer.max_steps == with_epochs.recorder.steps == steps
    saved = yaml.safe_load((with_epochs.run.path / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (steps, None)
    assert (
        f"{epochs:g} epoch{'' if epochs == 1 else 's'} of {22 - held_out} prompts = {steps} steps"
        in with_epochs.plan().lines(with_epochs.config)[0]
    )


def test_a_run_of_epochs_visits_each_prompt_so_often_and_its_schedule_ends_with_it(
    long_config: Callable[..., TrainConfig],
) -> None:
    seen: list[int] = []
    config = long_config(epochs=2, prompts_per_step=11, lr_schedule="linear")
    trainer = GRPOTrainer(
        config, callbacks=[lambda t, step, metrics: seen.extend(g.prompt.index for g in t.groups)], quiet=True
    )
    result = trainer.train()
    assert result.step == 4 and sorted(seen) == sorted([*range(22)] * 2)
    assert [row["optim/lr"] for row in result.metrics if "optim/lr" in row][-1] == pytest.approx(1e-4 / 4)


def test_a_run_of_epochs_goes_on_from_its_directory_and_from_the_same_options(
    long_config: Callable[..., TrainConfig],
) -> None:
    config = long_config(epochs=1, prompts_per_step=11)
    assert GRPOTrainer(config, quiet=True).train().step == 2
    more = TrainConfig.of_run(config.output, {"steps": 3})
    assert GRPOTrainer(more, resume=True, quiet=True).train().step == 3
    assert GRPOTrainer(config.model_copy(update={"epochs": 2.0}), resume=True, quiet=True).train().step == 4


def test_epochs_and_steps_together_are_refused_and_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    from flags import config_of

    with pytest.raises(InputError, match="epochs=2 and steps=5 both say how long to train; leave one out"):
        TrainConfig(epochs=2, steps=5)
    for file, flags, expected in (
        ("steps: 7\n", ["--epochs", "2"], (200, 2.0)),
        ("epochs: 3\n", ["--steps", "7"], (7, None)),
    ):
        path = tmp_path / "run.yaml"
        path.write_text(file)
        config = config_of(["--config", str(path), *flags])
        assert (config.steps, config.epochs) == expected


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_without_shuffle_prompts_come_in_the_order_of_the_data(
    long_config: Callable[..., TrainConfig], max_staleness: int
) -> None:
    seen: list[int] = []
    config = long_config(shuffle=False, prompts_per_step=8, steps=4, max_staleness=max_staleness)
    GRPOTrainer(
        config, callbacks=[lambda t, step, metrics: seen.extend(g.prompt.index for g in t.groups)], quiet=True
    ).train()
    assert seen == [*range(22), *range(10)]
    resumed: list[int] = []
    GRPOTrainer(
        TrainConfig.of_run(config.output, {"steps": 5}),
        callbacks=[lambda t, step, metrics: resumed.extend(g.prompt.index for g in t.groups)],
        resume=True,
        quiet=True,
    ).train()
    assert resumed == [*range(10, 18)]


def test_without_shuffle_held_out_prompts_are_drawn_and_the_rest_keeps_its_order(
    long_config: Callable[..., TrainConfig],
) -> None:
    config = long_config(shuffle=False, steps=1, eval_prompts=5)
    trainer = GRPOTrainer(config, quiet=True)
    trainer.close()
    shuffled = GRPOTrainer(config.model_copy(update={"shuffle": True}), overwrite=True, quiet=True)
    shuffled.close()
    held_out = [prompt.index for prompt in trainer.prompts.held_out]
    assert held_out == [prompt.index for prompt in shuffled.prompts.held_out] != [0, 1, 2, 3, 4]
    assert [p.index for p in trainer.source.draw(0, set(), is_first=True)] == [
        i for i in range(22) if i not in held_out
    ][:4]


def test_without_shuffle_dynamic_sampling_takes_the_prompts_that_follow(
    long_config: Callable[..., TrainConfig],
) -> None:
    trainer = GRPOTrainer(long_config(shuffle=False, steps=3, dynamic_sampling=3), quiet=True)
    used: set[int] = set()
    batches = [trainer.source.draw(1, used, is_first=first) for first in (True, False, False)]
    trainer.close()
    assert [[p.index for p in batch] for batch in batches] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
