"""Recipes: every one is a whole configuration, and stands below the user's own options."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from flags import config_of

from gruppo.advantage import ADVANTAGES
from gruppo.cli.main import run
from gruppo.errors import InputError
from gruppo.loss import Clip, ClippedWeight, MaskedWeight, TruncatedWeight, k2, token_mean
from gruppo.recipes import RECIPES, Recipe, recipe
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import LOSSES, build_advantage, build_loss

every = pytest.mark.parametrize("name", RECIPES)


@every
def test_a_recipe_is_a_configuration_whose_parts_can_be_built(name: str) -> None:
    made = recipe(name)
    config = made.config()
    assert (made.name, config.loss, config.advantage) == (name, made.values["loss"], made.values["advantage"])
    assert type(build_loss(config)) is LOSSES[config.loss]
    assert type(build_advantage(config)) is ADVANTAGES[config.advantage]


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


STATED: dict[str, dict[str, Any]] = {
    # section 4.2: 64 outputs per question, batch of 1024, one update, lr 1e-6, KL 0.04 (k3), at most 1024 tokens
    "deepseekmath": {"loss": "grpo", "advantage": "grpo", "normalization": "standard", "prompts_per_step": 1024 // 64}
    | {"group_size": 64, "minibatches": 1, "lr": 1e-6, "beta": 0.04, "kl_estimator": 2, "max_new_tokens": 1024},
    # section 4.1: 512 prompts x 16, mini-batches of 512 sequences, 20 rollout steps of warm-up, 16384 + 4096 tokens
    "dapo": {"loss": "dapo", "clip_range": (0.2, 0.28), "advantage": "grpo", "normalization": "standard"}
    | {"prompts_per_step": 512, "group_size": 16, "minibatches": 512 * 16 // 512, "lr": 1e-6, "lr_schedule": "constant"}
    | {"warmup_steps": 20 * 16, "beta": 0.0, "max_new_tokens": 16384 + 4096, "overlong_cache": 4096}
    | {"temperature": 1.0},
    # the authors' command: 128 prompts x 8, train_batch_size 128, lr 1e-6 constant, beta 0, 1024 and 3000 tokens
    "drgrpo": {"loss": "drgrpo", "advantage": "drgrpo", "prompts_per_step": 128, "group_size": 8}
    | {"minibatches": 128 * 8 // 128, "lr": 1e-6, "lr_schedule": "constant", "beta": 0.0, "max_new_tokens": 3000}
    | {"max_prompt_tokens": 1024, "temperature": 1.0},
    # section 5.1: four mini-batches, clip 3e-4 and 4e-4
    "gspo": {"loss": "gspo", "clip_range": (3e-4, 4e-4), "advantage": "grpo", "normalization": "standard"}
    | {"minibatches": 4},
    # section 5.1: 128 prompts x 8, mini-batches of 16, lr 1e-6 fixed, 20 rollout steps of warm-up, 32768 tokens
    "luspo": {"loss": "luspo", "clip_range": (2e-3, 2.5e-3), "advantage": "grpo", "normalization": "standard"}
    | {"prompts_per_step": 128, "group_size": 8, "minibatches": 128 // 16, "lr": 1e-6, "lr_schedule": "constant"}
    | {"warmup_steps": 20 * (128 // 16), "max_new_tokens": 32768, "temperature": 1.0},
    # section 3.1: 16 rounds of updates per generation batch, group advantage, no KL
    "cispo": {"loss": "cispo", "advantage": "grpo", "normalization": "standard", "minibatches": 16, "beta": 0.0},
    # section 5.1: four mini-batches, temperatures 1.0 and 1.05
    "sapo": {"loss": "sapo", "tau": (1.0, 1.05), "advantage": "grpo", "normalization": "standard", "minibatches": 4},
    # the post: the ratio of trainer and sampler, truncated
    "tis": {"correction": "truncate"},
    # section 2.3.4: 480 prompts x 8, lr 2e-6, weight decay 0.01, KL 0, temperature 1, at most 65,536 tokens
    "icepop": {"loss": "grpo", "correction": "mask", "prompts_per_step": 480, "group_size": 8, "lr": 2e-6}
    | {"weight_decay": 0.01, "beta": 0.0, "max_new_tokens": 65536, "temperature": 1.0},
    # section 3.1: 128 prompts x 8, 8192 tokens, lr 1e-6, temperature 0.99; A.1: 50 steps of warm-up, 1024 for prompts
    "lite_ppo": {"loss": "dapo", "advantage": "lite_ppo", "prompts_per_step": 128, "group_size": 8}
    | {"epochs_per_batch": 1, "lr": 1e-6, "warmup_steps": 50, "weight_decay": 0.0, "beta": 0.0}
    | {"max_new_tokens": 8192, "max_prompt_tokens": 1024, "temperature": 0.99},
    # A.3: 48 prompts x 16 per update, lr 5e-7 constant, 100 steps of warm-up, weight decay 0.01; section 2: tokens are
    # 12,288 of thought, 2,048 of solution, 2,048 of prompt; no KL; section 3.2: prompts without variance are dropped
    "scalerl": {"loss": "cispo", "advantage": "lite_ppo", "prompts_per_step": 48, "group_size": 16, "minibatches": 1}
    | {"lr": 5e-7, "lr_schedule": "constant", "warmup_steps": 100, "weight_decay": 0.01, "beta": 0.0}
    | {"max_new_tokens": 12288 + 2048, "max_prompt_tokens": 2048, "dynamic_sampling": 1},
    # A.2: 128 prompts x 32, mini-batches of 32 prompts, lr 1e-6, 10 steps of warm-up (of rollouts, as verl counts)
    "pass_at_k": {"loss": "dapo", "clip_range": (0.2, 0.28), "advantage": "pass_at_k", "prompts_per_step": 128}
    | {"group_size": 32, "minibatches": 128 // 32, "lr": 1e-6, "warmup_steps": 10 * (128 // 32), "beta": 0.0}
    | {"entropy_coef": 0.0},
    # OpenRLHF's script: 128 prompts x 8 in one update of 1024, k2 with 1e-5, lr 5e-7, IcePop, 10240 and 64000 tokens;
    # its program's defaults: eps_clip 0.2, a mean over tokens, a variance over N, temperature 1
    "reinforce_pp_baseline": {"loss": "dapo", "clip_range": 0.2, "advantage": "reinforce_pp_baseline"}
    | {"advantage_options": {"ddof": 0}, "correction": "mask", "kl_estimator": 1, "beta": 1e-5}
    | {"prompts_per_step": 128, "group_size": 8, "minibatches": 128 * 8 // 1024, "lr": 5e-7, "max_new_tokens": 64000}
    | {"max_prompt_tokens": 10240, "temperature": 1.0},
}  # fmt: skip
"""What each source states, read again apart from the book."""


def test_every_stated_value_is_what_the_source_states() -> None:
    assert {name: dict(made.stated) for name, made in RECIPES.items()} == STATED


def test_numbers_that_the_papers_state_otherwise_come_out_the_same() -> None:
    dapo, scalerl = recipe("dapo").config(), recipe("scalerl").config()
    assert dapo.prompts_per_step * dapo.group_size // dapo.minibatches == 512  # sequences per gradient step
    assert dapo.max_new_tokens - dapo.overlong_cache == 16384  # tokens without a penalty
    assert scalerl.prompts_per_step * scalerl.group_size == 768  # completions per gradient step
    assert build_loss(scalerl).surrogate == ClippedWeight(4.0)  # a weight of at most 1 + 4
    assert build_loss(recipe("tis").config()).correction == TruncatedWeight(high=2.0)
    for name in ("icepop", "reinforce_pp_baseline"):
        assert build_loss(recipe(name).config()).correction == MaskedWeight(low=0.5, high=5.0)
    authors = build_loss(recipe("reinforce_pp_baseline").config())
    assert (authors.surrogate, authors.aggregate, authors.kl) == (Clip(0.2, 0.2), token_mean, k2)
    assert [r.reference for r in (recipe("tis"), recipe("dapo"))] == ["blog", "arXiv:2503.14476"]


@every
def test_a_recipe_sets_the_token_limit_or_leaves_it_to_the_user_aloud(name: str) -> None:
    made = recipe(name)
    assert ("max_new_tokens" in made.values) != ("max_new_tokens" in made.yours)
    assert set(made.yours) <= TrainConfig.model_fields.keys() - made.values.keys()


def test_what_a_recipe_leaves_to_the_user_is_said_where_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "recipe cispo leaves max_new_tokens (256 here), overlong_cache (0 here) to you\n"
    assert run(["recipes", "cispo"]) == 0
    printed = capsys.readouterr()
    assert printed.err == said
    assert printed.out.endswith("\n# left to you\n# max_new_tokens: 256\n# overlong_cache: 0\n")
    (tmp_path / "run.yaml").write_text("overlong_cache: 128\n")
    for words, left in (
        ([], said),
        (["--max-new-tokens", "256"], "recipe cispo leaves overlong_cache (0 here) to you\n"),
        (["--max_new_tokens=512"], "recipe cispo leaves overlong_cache (0 here) to you\n"),
        (["--config", str(tmp_path / "run.yaml")], "recipe cispo leaves max_new_tokens (256 here) to you\n"),
        (["--config", str(tmp_path / "run.yaml"), "--max-new-tokens=512"], ""),
    ):
        config_of(["--recipe", "cispo", *words])
        assert capsys.readouterr().err == left, words
    config_of(["--recipe", "gspo"], {"max_new_tokens": 4})
    config_of(["--recipe", "dapo"])
    assert capsys.readouterr().err == ""


def test_file_and_flags_win_over_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("group_size: 4\nlr: 0.5\n")
    words = ["--recipe", "dapo", "--config", str(tmp_path / "run.yaml"), "--lr", "0.25"]
    config = config_of(words, {"beta": 0.5, "seed": 3})
    assert (config.loss, config.clip_range, config.dynamic_sampling) == ("dapo", (0.2, 0.28), 10)  # the recipe's
    assert (config.beta, config.seed) == (0.0, 3)  # the recipe's over the preset's; the preset's
    assert (config.group_size, config.lr) == (4, 0.25)  # the file's; the flag's
    assert config_of(["--recipe=gspo"]).loss == "gspo"


def test_a_recipe_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        InputError, match=r"there is no recipe 'dap' \(did you mean 'dapo'\?\); there are deepseekmath, "
    ):
        recipe("dap")
    with pytest.raises(InputError, match=r"^--recipe: expected one argument"):
        config_of(["--recipe"])


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
    with pytest.raises(AssertionError, match="both set and left to the user"):
        Recipe(name="x", title="T", paper="1", source="s", stated={"lr": 1.0}, yours=("lr",))
