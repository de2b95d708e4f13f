"""Words of a command line become checked values; the small helpers around the verbs."""

from pathlib import Path
from typing import Any

import pytest
from flags import config_of

from gruppo.cli.demo import PRESET, free_name
from gruppo.cli.main import OVERVIEW, VERBS, main, run
from gruppo.errors import InputError
from gruppo.trainer import TrainConfig


def parsed(*words: str, preset: dict[str, Any] | None = None):
    return config_of(words, preset)


def test_flags_win_over_the_file_which_wins_over_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nseed: 3\n")
    config = parsed("--config", str(path), "--steps", "9", preset={"steps": 5, "seed": 1, "group_size": 6})
    assert (config.steps, config.seed, config.group_size, config.prompts_per_step) == (9, 3, 6, 32)


def test_the_config_flag_may_stand_anywhere_and_take_an_equals_sign(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\n")
    assert parsed("--steps", "9", f"--config={path}").seed == 3


def test_flags_of_every_kind() -> None:
    config = parsed(
        *[
            "--clip-range",
            "0.2",
            "0.28",
            "--lora",
            "--no-tensorboard",
            "--rewards",
            "exact_match",
            "length_penalty",
            "--reward-weights",
            "1",
            "0.5",
        ],
        *[
            "--lr",
            "1e-4",
            "--beta",
            "0.01",
            "--stop",
            "END",
            "--tokens-per-microbatch",
            "512",
            "--tau",
            "1.5",
            "--eval-data",
            "x.jsonl",
        ],
    )
    assert config.clip_range == (0.2, 0.28)
    assert (config.lora, config.tensorboard) == (True, False)
    assert (config.rewards, config.reward_weights) == (("exact_match", "length_penalty"), (1.0, 0.5))
    assert (config.lr, config.beta, config.stop) == (1e-4, 0.01, ("END",))
    assert (config.tokens_per_microbatch, config.tau, config.eval_data) == (512, 1.5, "x.jsonl")


def test_one_number_is_a_clip_range_too() -> None:
    assert parsed("--clip-range", "0.3").clip_range == 0.3


def test_the_demos_preset_is_a_valid_config() -> None:
    config = config_of((), PRESET)
    assert (config.model, config.max_new_tokens, config.eval_prompts, config.threads) == ("builtin", 4, 512, 1)


def test_free_names_count_up(tmp_path: Path) -> None:
    name = str(tmp_path / "demo")
    assert free_name(name) == name
    (tmp_path / "demo").mkdir()
    assert free_name(name) == f"{name}-2"
    (tmp_path / "demo-2").write_text("")
    (tmp_path / "demo-4").mkdir()
    assert free_name(name) == f"{name}-3"


def test_every_verb_is_in_the_overview() -> None:
    for words in VERBS:
        assert f"  gruppo {' '.join(words)}" in OVERVIEW


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_without_a_verb_the_overview_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    assert capsys.readouterr().out == OVERVIEW


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import gruppo

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"gruppo {gruppo.__version__}\n"


@pytest.mark.parametrize("words", [["trian"], ["data"], ["data", "chekc"], ["nonsense", "--help"]])
def test_an_unknown_verb_exits_2_with_the_known_ones(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    message = capsys.readouterr().err
    assert f"there is no verb {' '.join(words[:2])!r}" in message
    assert "demo, train, resume, eval, sample, export, losses, data check, reward check" in message
    near = {"trian": "did you mean 'train'?", "data": "did you mean 'data check'?"}.get(words[0])
    assert (near in message) if near else "did you mean" not in message


@pytest.mark.parametrize("words", [["reward", "--help"], ["data", "-h"]])
def test_the_first_word_of_a_verb_has_the_help_of_the_verb(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 0
    assert f"usage: gruppo {words[0]} check" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_fits_a_terminal_and_has_no_words_of_python(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run([*verb, "--help"])
    text = capsys.readouterr().out
    assert "None" not in text
    too_wide = [line for line in text.splitlines() if len(line) > 80 and not line.startswith("  gruppo ")]
    assert too_wide == []  # an example is one line, to be copied
    assert "\n\n\n" not in text


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_help_of_every_verb_exits_0_and_names_it(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*verb, "--help"])
    assert ended.value.code == 0
    assert f"gruppo {' '.join(verb)}" in capsys.readouterr().out


def test_the_help_of_train_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.trainer import TrainConfig

    with pytest.raises(SystemExit):
        run(["train", "--help"])
    text = capsys.readouterr().out
    for name in TrainConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("words", [["--top-p", "0.9"], ["--top_k=50"], ["--min-p", "0.1"]])
@pytest.mark.row("R-34", "top-p and top-k for a run")
def test_filters_of_the_vocabulary_are_refused_with_the_reason(words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        config_of(words)
    flag = words[0].partition("=")[0].replace("_", "-")
    assert str(error.value).startswith(f"{flag} is refused: training draws from the whole vocabulary")
    assert "use temperature" in str(error.value)


def test_filters_in_a_file_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("top_p: 0.9\n")
    with pytest.raises(InputError, match=r"run\.yaml: top_p=0\.9 is refused: training draws from the whole vocabulary"):
        config_of(["--config", str(tmp_path / "run.yaml")])


def test_variables_of_a_chat_template_from_flags_and_yaml(tmp_path: Path) -> None:
    words = ["--chat-template-kwargs", "enable_thinking", "False"]
    config = config_of(words)
    assert config.chat_template_kwargs == {"enable_thinking": False}
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    again = config_of(["--config", str(tmp_path / "run.yaml")])
    assert again.chat_template_kwargs == {"enable_thinking": False}


def test_a_flag_of_another_trainer_is_answered_with_the_flag_here() -> None:
    with pytest.raises(InputError, match=r"unknown option --num-generations; it is called --group-size here"):
        config_of(["--num-generations", "8"])


# --- errors and help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "ten"], "train: steps='ten': Input should be a valid integer, unable to parse string"),
        (["--lr", "fast"], "train: lr='fast': Input should be a valid number, unable to parse string as a number"),
        (["--clip-range", "a", "b"], "train: clip_range=('a', 'b'): Input should be a valid number\ntrain: clip_range"),
        (["--group-size", "1"], "train: group_size=1: a group needs at least two completions to compare"),
        (["--group-sise", "4"], "unknown option --group-sise; did you mean --group-size?"),
        (["--qwerty=4"], "unknown option --qwerty; see `gruppo train --help`"),
        (["builtin"], "'builtin' belongs to no flag; leave it out, or see `gruppo train --help`"),
        (["--lora-rank"], "--lora-rank: expected one argument; see `gruppo train --help`"),
        (["--dtype", "f16"], "train: dtype='f16': Input should be 'auto', 'float32' or 'bfloat16'"),
        (["--minibatches", "3"], "train: minibatches=3 does not divide prompts_per_step=32; use one of [1, 2, 4,"),
    ],
)
def test_a_wrong_flag_is_an_error_in_plain_lines(words: list[str], text: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(*words)
    said = str(error.value)
    assert said.startswith(text)
    assert not any(noise in said for noise in ("pydantic", " type=", "Annotated", "NoneType", "\u2502", "\u2500"))


def test_help_lists_the_flags_of_the_verb_and_plain_types(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for flag in ("--config FILE", "--recipe NAME", "--overwrite", "--lr FLOAT", "--clip-range FLOAT [FLOAT ...]"):
        assert flag in out
    assert "{None" not in out and "(default: None)" not in out and "--no-overwrite" not in out


def test_the_size_of_the_embedded_model_in_the_help_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.model import TransformersModel

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    million = sum(p.numel() for p in TransformersModel("builtin").model.parameters()) / 1e6
    assert f"'builtin' ({million:.2f} M parameters" in " ".join(capsys.readouterr().out.replace("\u2502", " ").split())


def test_one_name_does_for_a_list_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rewards: number_match\nstop: END\nlora_targets: q_proj\n")
    config = parsed("--config", str(tmp_path / "run.yaml"))
    assert (config.rewards, config.stop, config.lora_targets) == (("number_match",), ("END",), ("q_proj",))


def test_the_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text(
        "output: ~/runs/a\nmodel: ~/m\ndata: gsm8k:~/train.jsonl\neval_data: ~/e.jsonl\n"
    )
    config = parsed("--config", "~/run.yaml")
    assert config.output == f"{tmp_path}/runs/a" and config.model == f"{tmp_path}/m"
    assert config.data == f"gsm8k:{tmp_path}/train.jsonl" and config.eval_data == f"{tmp_path}/e.jsonl"
    assert parsed("--output=~/runs/b", "--data", "hf://org/a~b").output == f"{tmp_path}/runs/b"
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("steps: 7\n")
    assert TrainConfig.of_run("~/runs/a").steps == 7


def test_what_was_not_written_is_not_set(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps: 5\n")
    config = parsed("--config", str(tmp_path / "run.yaml"), "--no-tensorboard", "--group_size=4")
    assert config.model_fields_set == {"steps", "tensorboard", "group_size"}


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--steps", "1", "--steps=2"], "--steps"),
        (["--group_size", "4", "--group-size", "4"], "--group-size"),
        (["--lora", "--no-lora"], "--lora"),
        (["--rewards", "exact_match", "--rewards", "number_match"], "--rewards"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config"),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(words: list[str], flag: str) -> None:
    with pytest.raises(InputError, match=f"^{flag} is given twice; leave one out"):
        parsed(*words)


def test_a_name_without_its_value_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--loss-options threshold 1 share: a value must follow each name"):
        parsed("--loss-options", "threshold", "1", "share")


def test_numbers_written_as_text_and_words_for_truth_stay_values(tmp_path: Path) -> None:
    """YAML reads 1e-5 as a text, and a quoted yes too."""
    (tmp_path / "run.yaml").write_text("lr: 1e-5\nsteps: '3'\nlora: 'yes'\nloss_options: {a: true, b: 1}\n")
    config = parsed("--config", str(tmp_path / "run.yaml"))
    assert (config.lr, config.steps, config.lora) == (1e-5, 3, True)
    assert config.loss_options == {"a": True, "b": 1} and config.loss_options["a"] is True
