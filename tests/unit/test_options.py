"""Option groups: each option stands in one of them, with a sentence, and TrainConfig is all of them."""

import ast
from pathlib import Path
from typing import Any

import pytest
from flags import config_of

import gruppo
from gruppo import options
from gruppo.errors import InputError
from gruppo.trainer import TrainConfig

SOURCE = Path(gruppo.__file__).parent
GROUPS = (
    options.ModelOptions,
    options.DataOptions,
    options.RewardOptions,
    options.RolloutOptions,
    options.AdvantageOptions,
    options.LossOptions,
    options.OptimOptions,
    options.EvalOptions,
    options.RunOptions,
)
ADVANCED = options.AdvancedOptions.model_fields


def test_the_options_of_a_run_are_those_of_its_groups_theme_by_theme() -> None:
    assert list(TrainConfig.model_fields) == [name for group in GROUPS for name in group.model_fields]
    assert list(TrainConfig().model_dump()) == list(TrainConfig.model_fields)


def test_no_option_is_in_two_groups() -> None:
    assert sum(len(group.model_fields) for group in GROUPS) == len(TrainConfig.model_fields)


def test_a_group_stands_alone_and_checks_itself() -> None:
    assert options.RewardOptions(rewards=("a", "b"), reward_weights=(1.0, 0.5)).reward_weights == (1.0, 0.5)
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 rewards; give one each"):
        options.RewardOptions(rewards=("a", "b"), reward_weights=(1.0,))
    with pytest.raises(ValueError, match="kl_target needs kl_in_reward above 0"):
        TrainConfig(advanced={"kl_target": 1.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="eval_samples needs eval_prompts"):
        options.EvalOptions(eval_samples=2, eval_prompts=0)
    with pytest.raises(ValueError, match="sampler='tpu' is unknown"):
        options.RolloutOptions(sampler="tpu")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        options.OptimOptions(model="builtin")  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="frozen"):
        options.RunOptions().seed = 3  # type: ignore[misc]


def sentences(file: Path) -> dict[str, str]:
    """The help of each option in a file: the text below its field."""
    found = {}
    for cls in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(cls, ast.ClassDef) or not cls.name.endswith(("Options", "Arguments")):
            continue
        for line, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
                text = after.value if isinstance(after, ast.Expr) else None
                found[f"{cls.name}.{ast.unparse(line.target)}"] = (
                    str(text.value) if isinstance(text, ast.Constant) else ""
                )
    return found


FILES = [SOURCE / "options.py", *(f for f in sorted((SOURCE / "cli").glob("*.py")) if sentences(f))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_option_has_a_sentence(file: Path) -> None:
    found = sentences(file)
    assert [name for name, text in found.items() if not text.endswith(".")] == []
    assert [name for name, text in found.items() if "so many" in text or "none:" in text.lower()] == []


def test_all_sentences_were_read() -> None:
    assert len(sentences(SOURCE / "options.py")) == len(TrainConfig.model_fields) + len(ADVANCED)
    classes = {name.partition(".")[0] for file in FILES for name in sentences(file)}
    assert len(classes) == len(GROUPS) + 17  # groups of options, and verbs with arguments of their own


def test_the_help_shows_the_sentence_of_an_option_of_each_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # a line may break inside a word with a hyphen
    with pytest.raises(SystemExit):
        config_of(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, text in sentences(SOURCE / "options.py").items():
        assert " ".join(text.split()) in shown, name


@pytest.mark.parametrize("values", [{"adam_beta2": 0.95}, {"advanced": {"adam_beta2": 0.95}}])
def test_an_advanced_option_is_read_from_its_mapping_and_from_where_it_stood_before(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = TrainConfig.read(values)
    assert (config.advanced.adam_beta2, config.advanced.adam_beta1) == (0.95, 0.9)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert TrainConfig.from_yaml(tmp_path / "run.yaml", {"ref_mix": 0.5}).advanced.adam_beta2 == 0.95
    assert "advanced:\n  adam_beta1: 0.9\n  adam_beta2: 0.95\n" in config.to_yaml()


def test_flags_and_file_each_set_their_own_advanced_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("advanced: {adam_beta1: 0.8, adam_beta2: 0.9}\nref_mix: 0.5\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--advanced", "adam_beta2", "0.95", "compile", "False"]
    more = config_of(words).advanced
    assert (more.adam_beta1, more.adam_beta2, more.ref_mix, more.compile) == (0.8, 0.95, 0.5, False)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"advanced": {"adam_beta": 1}}, "unknown option 'advanced.adam_beta'; did you mean 'advanced.adam_beta2'?"),
        ({"advanced": {"adam_beta2": 2}}, "advanced.adam_beta2=2: Input should be less than 1"),
        ({"advanced": {"patience": True}}, "advanced.patience=True: it is true or false; write a number"),
        ({"advanced": 3}, "advanced=3: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_advanced_option_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as refused:
        TrainConfig.read(values)
    assert str(refused.value).startswith(f"config: {told}")


def test_an_advanced_option_in_two_places_is_refused() -> None:
    with pytest.raises(InputError, match=r"^ref_mix and advanced\.ref_mix are one option; leave the first out"):
        TrainConfig.read({"ref_mix": 1, "advanced": {"ref_mix": 1}})
    with pytest.raises(InputError, match="are one option"):
        config_of(["--ref-mix", "1", "--advanced", "ref_mix", "0.5"])


def test_an_advanced_option_has_a_flag_of_its_own_too() -> None:
    more = config_of(["--adam-beta2", "0.95", "--no-compile", "--advanced", "adam_beta1", "0.8"]).advanced
    assert (more.adam_beta2, more.compile, more.adam_beta1) == (0.95, False, 0.8)
    with pytest.raises(InputError, match=r"unknown option --adam-bet2; did you mean --adam-beta2\?"):
        config_of(["--adam-bet2", "1"])


def test_a_truth_value_given_as_a_flag_is_one() -> None:
    words = ["--loss-options", "outward_only", "False", "threshold", "1", "--sampler", "vllm"]
    words += ["--vllm-options", "enforce_eager", "True", "gpu_memory_utilization", "0.5", "quantization", "fp8"]
    config = config_of(words)
    assert config.loss_options == {"outward_only": False, "threshold": 1}
    assert config.vllm_options == {"enforce_eager": True, "gpu_memory_utilization": 0.5, "quantization": "fp8"}
    assert type(config.loss_options["threshold"]) is int
