"""Recipes: every one is a whole configuration, and stands below the user's own options."""

from pathlib import Path

import pytest
import yaml

from gruppo.advantage import ADVANTAGES
from gruppo.cli.main import run
from gruppo.cli.options import parse_run
from gruppo.errors import InputError
from gruppo.loss import MaskedWeight, TruncatedWeight
from gruppo.recipes import RECIPES, Recipe, recipe
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import LOSSES, build_advantage, build_loss, build_shape

every = pytest.mark.parametrize("name", RECIPES)


@every
def test_a_recipe_is_a_configuration_whose_parts_can_be_built(name: str) -> None:
    made = recipe(name)
    config = made.config()
    assert (made.name, config.loss, config.advantage) == (name, made.values["loss"], made.values["advantage"])
    assert type(build_loss(config)) is LOSSES[config.loss]
    assert type(build_advantage(config)) is ADVANTAGES[config.advantage]
    assert build_shape(config).overlong_cache == config.overlong_cache


@every
def test_a_recipe_leaves_model_data_rewards_and_length_to_the_user(name: str) -> None:
    own = {"model", "data", "rewards", "reward_weights", "steps", "output", "seed", "eval_data"}
    assert own & set(recipe(name).values) == set()


@every
def test_a_recipe_printed_is_a_config_file_of_the_same_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["recipes", name]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert TrainConfig.from_yaml(tmp_path / "run.yaml") == recipe(name).config()


def test_numbers_of_the_papers() -> None:
    """Read again from the sources, apart from the book."""
    dapo = recipe("dapo").config()
    assert (dapo.prompts_per_step * dapo.group_size, dapo.clip_range, dapo.lr) == (8192, (0.2, 0.28), 1e-6)
    assert (dapo.prompts_per_step * dapo.group_size) // dapo.minibatches == 512  # sequences per gradient step
    assert (dapo.max_new_tokens, dapo.max_new_tokens - dapo.overlong_cache, dapo.beta) == (20480, 16384, 0.0)
    assert dapo.warmup_steps == 20 * dapo.minibatches
    math = recipe("deepseekmath").config()
    assert (math.prompts_per_step * math.group_size, math.group_size, math.beta, math.lr) == (1024, 64, 0.04, 1e-6)
    assert (math.optimizer_steps == math.steps, math.max_new_tokens) == (True, 1024)
    assert (recipe("gspo").config().clip_range, recipe("gspo").config().minibatches) == ((3e-4, 4e-4), 4)
    assert recipe("sapo").config().tau == (1.0, 1.05)
    assert build_loss(recipe("tis").config()).correction == TruncatedWeight(high=2.0)
    assert build_loss(recipe("icepop").config()).correction == MaskedWeight(low=0.5, high=5.0)
    assert [r.reference for r in (recipe("tis"), recipe("dapo"))] == ["blog", "arXiv:2503.14476"]
    drgrpo = recipe("drgrpo").config()
    assert (drgrpo.group_size, drgrpo.max_new_tokens, drgrpo.beta, drgrpo.lr) == (8, 3000, 0.0, 1e-6)


def test_file_and_flags_win_over_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("group_size: 4\nlr: 0.5\n")
    words = ["--recipe", "dapo", "--config", str(tmp_path / "run.yaml"), "--lr", "0.25"]
    config = parse_run(words, verb="train", description="", preset={"beta": 0.5, "seed": 3})
    assert (config.loss, config.clip_range, config.dynamic_sampling) == ("dapo", (0.2, 0.28), 10)  # the recipe's
    assert (config.beta, config.seed) == (0.0, 3)  # the recipe's over the preset's; the preset's
    assert (config.group_size, config.lr) == (4, 0.25)  # the file's; the flag's
    assert parse_run(["--recipe=gspo"], verb="train", description="", preset={}).loss == "gspo"


def test_a_recipe_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        InputError, match=r"there is no recipe 'dap' \(did you mean 'dapo'\?\); there are deepseekmath, "
    ):
        recipe("dap")
    with pytest.raises(InputError, match="--recipe needs a name after it"):
        parse_run(["--recipe"], verb="train", description="", preset={})


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[: len(RECIPES)]] == [[n, r.reference] for n, r in RECIPES.items()]


def test_a_recipe_cannot_be_changed_and_own_options_win() -> None:
    made = recipe("dapo")
    with pytest.raises(TypeError):
        made.stated["lr"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        made.name = "other"  # type: ignore[misc]
    assert made.config(group_size=2, lr=1e-3).lr == 1e-3
    with pytest.raises(InputError, match="recipe dapo: unknown option 'lrr'; did you mean 'lr'"):
        made.config(lrr=1)


def test_stated_and_chosen_are_apart_in_yaml() -> None:
    made = Recipe(name="x", title="T", paper="1", source="s", stated={"lr": 1e-3}, chosen={"beta": 0.5}, differs=("d",))
    text = made.to_yaml()
    assert text.splitlines()[:3] == ["# T", "# arXiv:1; s", "# here: d"]
    assert text.index("lr:") < text.index("chosen here") < text.index("beta:")
    assert yaml.safe_load(text) == {"lr": 1e-3, "beta": 0.5}
    with pytest.raises(AssertionError, match="both stated and chosen"):
        Recipe(name="x", title="T", paper="1", source="s", stated={"lr": 1.0}, chosen={"lr": 2.0})
