"""TrainConfig: every wrong value is named with its field, what came and what would do."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flags import config_of

from gruppo.cli.main import run
from gruppo.errors import InputError
from gruppo.loss import DAPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from gruppo.peer_names import ELSEWHERE
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import LOSSES, build_loss
from gruppo.trainer.config import OPTIONS


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"group_sise": 4}, "run.yaml: unknown option 'group_sise'; did you mean 'group_size'?"),
        ({"learning_rate": 1e-4}, "run.yaml: unknown option 'learning_rate'"),
        (
            {"overwrite": True},
            "run.yaml: overwrite is an argument of GRPOTrainer: GRPOTrainer(config, overwrite=True); on the command "
            "line --overwrite",
        ),
        (
            {"resume": True},
            "run.yaml: resume is an argument of GRPOTrainer: GRPOTrainer(config, resume=True); on the command line "
            "gruppo resume RUN",
        ),
        (
            {"peft_config": {"r": 8}},
            "run.yaml: peft_config is an argument of GRPOTrainer: GRPOTrainer(config, peft_config=...)",
        ),
        ({"callbacks": []}, "run.yaml: callbacks is an argument of GRPOTrainer: GRPOTrainer(config, callbacks=[...])"),
        ({"zzz": 1}, "run.yaml: unknown option 'zzz'; see `gruppo train --help`"),
        ({"steps": "many"}, "run.yaml: steps='many': Input should be a valid integer"),
        ({"steps": 2.5}, "run.yaml: steps=2.5: Input should be a valid integer"),
        ({"steps": 0}, "run.yaml: steps=0: Input should be greater than or equal to 1"),
        ({"group_size": 1}, "run.yaml: group_size=1: a group needs at least two completions to compare"),
        ({"group_size": 0}, "run.yaml: group_size=0: a group needs at least two completions to compare"),
        ({"tokens_per_microbatch": 0}, "run.yaml: tokens_per_microbatch=0: Input should be greater than or equal to 1"),
        ({"lr": -1e-4}, "run.yaml: lr=-0.0001: Input should be greater than 0"),
        ({"lr": math.nan}, "run.yaml: lr=nan: Input should be"),
        ({"loss": GSPOLoss()}, "run.yaml: loss=<GSPOLoss>: a config holds names; give it to GRPOTrainer(config, loss="),
        ({"beta": math.inf}, "run.yaml: beta=inf: Input should be a finite number"),
        ({"temperature": 0}, "run.yaml: temperature=0: Input should be greater than 0"),
        ({"normalization": "std"}, "run.yaml: normalization='std': Input should be 'standard' or 'centered'"),
        ({"dtype": "float16"}, "run.yaml: dtype='float16': Input should be 'auto', 'float32' or 'bfloat16'"),
        (
            {"lora_dropout": 0.1},
            "run.yaml: lora_dropout=0.1 is refused: with dropout the same weights give the same tokens",
        ),
        ({"quantize": "int8"}, "run.yaml: quantize='int8': Input should be 'nf4'"),
        ({"lora": "perhaps"}, "run.yaml: lora='perhaps': Input should be a valid boolean"),
        ({"rewards": 3}, "run.yaml: rewards=3: Input should be a valid tuple"),
        ({"patience": 2}, "run.yaml: patience=2 needs eval_every of at least 1: nothing is evaluated on the way"),
        ({"keep_best": True}, "run.yaml: keep_best needs eval_every of at least 1: nothing is evaluated on the way"),
        (
            {"keep_best": True, "eval_every": 5, "eval_prompts": 0},
            "run.yaml: keep_best needs eval_prompts of at least 1",
        ),
        ({"patience": 2, "eval_every": 5, "eval_prompts": 0}, "run.yaml: patience=2 needs eval_prompts of at least 1"),
        (
            {"minibatches": 3, "prompts_per_step": 8},
            "run.yaml: minibatches=3 does not divide prompts_per_step=8; use one of [1, 2, 4, 8]",
        ),
        ({"clip_range": 0}, "run.yaml: clip_range must be positive, got 0"),
        ({"clip_range": (-0.2, 0.2)}, "run.yaml: clip_range must be positive, got (-0.2, 0.2)"),
        ({"rewards": []}, "run.yaml: rewards needs at least one function, e.g. exact_match"),
        (
            {"rewards": ("exact_match",), "reward_weights": (1.0, 2.0)},
            "run.yaml: reward_weights has 2 entries for 1 rewards; give one each",
        ),
        ({"data": ["a.jsonl", "b.jsonl"]}, "run.yaml: data=['a.jsonl', 'b.jsonl']: it is one source; join the files"),
        ({"data": [{"prompt": "1"}]}, "run.yaml: data=[{'prompt': '1'}]: it is a name here; rows and data sets go to"),
        ({"eval_samples": 4, "eval_prompts": 0}, "run.yaml: eval_samples needs eval_prompts of at least 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as error:
        TrainConfig.read(values, where="run.yaml")
    assert str(error.value).startswith(expected)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(InputError) as error:
        TrainConfig.read({"group_size": 1, "lr": "fast", "zzz": "red"})
    lines = str(error.value).splitlines()
    assert [line.split(": ")[1].split("=")[0] for line in lines] == [
        "group_size",
        "lr",
        "unknown option 'zzz'; see `gruppo train --help`",
    ]


def test_a_pair_of_the_wrong_length_names_the_field() -> None:
    with pytest.raises(InputError, match="clip_range"):
        TrainConfig.read({"clip_range": (0.1, 0.2, 0.3)})


def test_the_number_of_optimizer_steps_is_the_product() -> None:
    assert TrainConfig(steps=5, epochs_per_batch=3, minibatches=4, prompts_per_step=8).optimizer_steps == 60


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().steps = 3  # type: ignore[misc]


# --- YAML ---------------------------------------------------------------------------------------------------------


def test_a_config_survives_yaml(tmp_path: Path) -> None:
    config = TrainConfig(
        clip_range=(0.2, 0.28), tau=(1.0, 1.05), rewards=("exact_match", "length_penalty"), reward_weights=(1.0, 0.25),
        stop=("\n", "é"), lr=3e-5, system='say "ü"', lora_targets=("q_proj", "v_proj"),
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_yaml(tmp_path / "run.yaml") == config


def test_numbers_in_yamls_odd_spellings_are_numbers(tmp_path: Path) -> None:
    # 1e-4 without a dot is a string to YAML.
    (tmp_path / "run.yaml").write_text("lr: 1e-4\nclip_range: [0.2, 28e-2]\nsteps: 1_000\n")
    config = TrainConfig.from_yaml(tmp_path / "run.yaml")
    assert (config.lr, config.clip_range, config.steps) == (1e-4, (0.2, 0.28), 1000)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps: 7\nseed: 3\n")
    config = TrainConfig.from_yaml(tmp_path / "run.yaml", {"steps": 9})
    assert (config.steps, config.seed) == (9, 3)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert TrainConfig.from_yaml(tmp_path / "run.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- steps\n- 3\n", "must hold `option: value` lines, got a list"),
        ("just words\n", "must hold `option: value` lines, got a str"),
        ("steps: [3\n", "is not YAML"),
        ("steps: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        ("1: 2\n", "unknown option '1'"),
        ("on: 2\n", "unknown option 'True'"),  # YAML 1.1 reads `on` as true
    ],
)
def test_a_file_that_is_not_a_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        TrainConfig.from_yaml(path)
    assert str(path) in str(error.value)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config file .*absent\.yaml does not exist"):
        TrainConfig.from_yaml(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="is not YAML"):
        TrainConfig.from_yaml(tmp_path / "run.yaml")


# --- from a config to a loss --------------------------------------------------------------------------------------


WITHOUT_CLIP = {"gmpo", "vespo", "dppo_tv", "dppo_kl", "prime", "ipo", "m2po", "kl_cov", "reinforce", "gpg", "dro"}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_built_with_the_configs_options(name: str) -> None:
    options: dict[str, Any] = {"loss": name, "beta": 0.25, "entropy_coef": 0.5, "max_new_tokens": 77}
    if name in WITHOUT_CLIP:
        with pytest.raises(InputError, match=f"loss='{name}' does not take clip_range; grpo, "):
            build_loss(TrainConfig(**options, clip_range=(0.1, 0.3)))
    else:
        options["clip_range"] = (0.1, 0.3)
    loss = build_loss(TrainConfig(**options))
    assert type(loss) is LOSSES[name]
    assert (loss.beta, loss.entropy_coef) == (0.25, 0.5)
    assert name in WITHOUT_CLIP or loss.clip_range == (0.1, 0.3)


def test_without_a_clip_range_each_loss_has_its_own() -> None:
    assert build_loss(TrainConfig(loss="grpo")).clip_range == GRPOLoss().clip_range == (0.2, 0.2)
    assert build_loss(TrainConfig(loss="dapo")).clip_range == DAPOLoss().clip_range == (0.2, 0.28)


def test_dr_grpo_divides_by_the_configs_completion_length() -> None:
    loss = build_loss(TrainConfig(loss="drgrpo", max_new_tokens=77))
    assert repr(loss) == repr(DRGRPOLoss(max_completion_length=77))
    assert "77" in repr(loss)


def test_tau_reaches_sapo() -> None:
    assert repr(build_loss(TrainConfig(loss="sapo", tau=(1.0, 2.5)))) == repr(SAPOLoss(tau=(1.0, 2.5)))


def test_an_option_that_a_loss_does_not_take_is_refused() -> None:
    with pytest.raises(InputError, match="loss='grpo' does not take tau; sapo do"):
        build_loss(TrainConfig(loss="grpo", tau=1.5))


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="loss='gpo' is unknown; use one of grpo, gspo, sapo, cispo, bnpo, drgrpo, dapo"
    ):
        build_loss(TrainConfig(loss="gpo"))


def test_a_loss_of_ones_own_is_imported() -> None:
    assert type(build_loss(TrainConfig(loss="gruppo.loss:GSPOLoss"))) is GSPOLoss


def test_something_else_than_a_loss_is_refused() -> None:
    with pytest.raises(InputError, match="loss='math:sqrt'"):
        build_loss(TrainConfig(loss="math:sqrt"))


# --- names of other trainers, columns and rows of one's own -----------------------------------------------------------


def test_options_of_other_trainers_are_answered_with_their_name_here() -> None:
    with pytest.raises(InputError, match=r"unknown option 'num_generations'; it is called group_size here$"):
        TrainConfig.read({"num_generations": 8})
    with pytest.raises(InputError, match=r"'epsilon_high'; it is called clip_range here \(its second number\)"):
        TrainConfig.read({"epsilon_high": 0.28})
    for theirs, ours in ELSEWHERE.items():
        assert theirs not in OPTIONS and ours.partition(":")[0] in OPTIONS, theirs


def rows(path: Path, num: int, **columns: Callable[[int], Any]) -> str:
    lines = [json.dumps({name: make(i) for name, make in columns.items()}) for i in range(num)]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def test_columns_are_found_under_the_names_that_the_data_has(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", 40, problem=lambda i: f"{i}+1=", solution=lambda i: str(i + 1), step=lambda i: i)
    with pytest.raises(InputError, match=r"column_map=\{'step': 'row_step'\}"):
        make_trainer(data=data, prompt_column="problem", answer_column="solution")
    options = {"prompt_column": "problem", "answer_column": "solution", "column_map": {"step": "row_step"}}
    trainer = make_trainer(data=data, **options, output=str(tmp_path / "out"))
    assert trainer.prompts.train.prompts[3].columns == {"answer": "4", "row_step": 3}


def test_bad_rows_stop_a_run_or_are_left_out_aloud(
    make_trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = rows(tmp_path / "d.jsonl", 40, prompt=lambda i: "" if i == 7 else f"{i}+1=", answer=lambda i: str(i + 1))
    with pytest.raises(InputError, match=r"d\.jsonl:8: .*on_bad_row='drop'"):
        make_trainer(data=data)
    trainer = make_trainer(data=data, on_bad_row="drop", steps=1, output=str(tmp_path / "out"))
    assert len(trainer.prompts.train) == 39
    trainer.train()
    assert "1 row is left out; the first: " in caplog.text
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [e["text"].split(";")[0] for e in events if e["event"] == "rows_left_out"] == ["1 row is left out"]


@pytest.mark.parametrize(("num", "held_out"), [(60, 12), (640, 128), (1000, 128), (4, 0)])
def test_a_fifth_is_held_out_of_little_data(
    make_trainer: Callable[..., Any], tmp_path: Path, num: int, held_out: int
) -> None:
    data = rows(tmp_path / "d.jsonl", num, prompt=lambda i: f"{i}+1=", answer=lambda i: str(i + 1))
    trainer = make_trainer(data=data, eval_prompts=None, max_new_tokens=5)
    assert (len(trainer.prompts.train), len(trainer.prompts.held_out)) == (num - held_out, held_out)


def test_the_constructor_answers_as_a_file_does() -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig(num_generations=4, learning_rate=1e-5, steps=0, top_p=0.9)  # type: ignore[call-arg]
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("TrainConfig: steps=0: ")
    assert lines[1:3] == [
        "TrainConfig: unknown option 'num_generations'; it is called group_size here",
        "TrainConfig: unknown option 'learning_rate'; it is called lr here",
    ]
    assert lines[3].startswith("TrainConfig: top_p=0.9 is refused: ")


def test_a_file_of_trl_is_answered_with_the_command_that_converts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trl.yaml"
    path.write_text("model_name_or_path: builtin\nnum_generations: 4\nmax_steps: 7\n")
    with pytest.raises(InputError) as caught:
        TrainConfig.from_yaml(path)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(f"{path} looks like a configuration of TRL; `gruppo convert trl {path}`")
    assert run(last.split("`")[1].split()[1:]) == 0  # the remedy, typed as it stands
    converted = yaml.safe_load(capsys.readouterr().out)
    assert (converted["model"], converted["group_size"], converted["steps"]) == ("builtin", 4, 7)
    path.write_text("learning_rate: 1e-5\nsteps: 7\n")
    with pytest.raises(InputError) as caught:
        TrainConfig.from_yaml(path)
    assert str(caught.value) == f"{path}: unknown option 'learning_rate'; it is called lr here"


@pytest.mark.parametrize("given", [{"bounds": [0.5, 4]}, {"bounds": (0.5, 4.0)}, {"bounds": "0.5,4"}])
def test_an_option_of_a_loss_may_be_a_pair_of_numbers(given: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig(loss="clip_cov", loss_options=given)
    assert build_loss(config) == LOSSES["clip_cov"](bounds=(0.5, 4.0))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert build_loss(TrainConfig.from_yaml(tmp_path / "run.yaml")) == build_loss(config)
    words = ["--loss", "vespo", "--loss-options", "positive", "2.5,3", "negative", "1,2"]
    by_flags = build_loss(config_of(words))
    assert by_flags == LOSSES["vespo"](positive=(2.5, 3.0), negative=(1.0, 2.0))
