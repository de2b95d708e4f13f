"""R-07, R-26 and other bad input: exit code 2 before the model is loaded; field, value and remedy; nothing is left."""

import json
import logging
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import tree_hash

from gruppo.cli.main import main
from gruppo.model import TransformersModel
from gruppo.task.builtin import builtin_model_path

Fails = Callable[..., str]


def _without(words: list[str], flags: set[str]) -> list[str]:
    """The words of a command line without these flags and their values."""
    kept, is_kept = [], True
    for word in words:
        is_kept = word not in flags if word.startswith("--") else is_kept
        kept += [word] * is_kept
    return kept


@pytest.fixture
def fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: Callable[..., list[str]]
) -> Fails:
    """Run a command that must exit with 2 before a model is made; gives what it said, without boxes and line ends."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(TransformersModel, "__init__", forbidden)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # transformers logs to a stderr that pytest has replaced

    def run(*words: str, verb: str = "train", quotes: bool = False, **changes: Any) -> str:
        output = tmp_path / "run"
        existed = output.exists()
        place = changes.pop("output", output)
        usual = [] if verb != "train" else flags(place, **changes)
        given = [verb, *_without(usual, {word for word in words if word.startswith("--")}), *words]
        with pytest.raises(SystemExit) as ended:
            main(given)
        captured = capsys.readouterr()
        text = " ".join(re.sub("[│╭╰─╮╯]", " ", captured.err + captured.out).split())
        assert ended.value.code == 2, text
        assert quotes or "Traceback" not in text
        assert output.exists() == existed
        return text

    return run


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def sums(num: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i:02d}+01=", "answer": f"{i + 1:03d}"} for i in range(num)]


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--group-size", "1"], ["group_size", "a group needs at least two completions", "1"]),
        (["--group-size", "0"], ["group_size", "a group needs at least two completions", "0"]),
        (["--steps", "many"], ["steps='many'", "valid integer"]),
        (["--minibatches", "3"], ["minibatches=3 does not divide prompts_per_step=8; use one of [1, 2, 4, 8]"]),
        (["--clip-range", "0.3", "0.2"], ["clip_range", "(0.3, 0.2)", "did you mean (0.2, 0.3)?"]),
        (["--lr", "nan"], ["lr", "finite number", "nan"]),
        (["--temperature", "0"], ["temperature", "greater than 0", "0"]),
        (["--group-sise", "4"], ["--group-sise", "did you mean --group-size?"]),
        (["--advantage", "gae"], ["advantage='gae' is unknown; use one of grpo, rloo", "your.module:YourAdvantage"]),
        (["--recipe", "dap"], ["there is no recipe 'dap' (did you mean 'dapo'?)"]),
        (["--loss", "gpo"], ["loss='gpo' is unknown; use one of grpo, gspo"]),
        (["--tau", "2"], ["loss='grpo' does not take tau; sapo do"]),
        (["--rewards", "exact_mach"], ["'exact_mach'", "did you mean 'exact_match'?"]),
        (["--rewards", "no_such_module:f"], ["no module 'no_such_module'"]),
        (["--rewards", "math:no_such_function"], ["has no 'no_such_function'"]),
        (["--rewards", "exact_match", "exact_match"], ["different names"]),
        (["--reward-weights", "1", "2"], ["reward_weights has 2 entries for 1 rewards; give one each"]),
        (["--eval-prompts", "100000"], ["eval_prompts=100000 leaves none of the", "lower it, or give eval_data"]),
        (["--prompts-per-step", "5000"], ["prompts_per_step=5000 is more than the", "lower it"]),
        (["--max-new-tokens", "64"], ["max_new_tokens=64 leaves no room for a prompt", "64"]),
        (["--config"], ["--config: expected one argument"]),
        (["--config", "absent.yaml"], ["config file absent.yaml does not exist"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
@pytest.mark.row("R-26", "wrong flags")
def test_a_wrong_option_is_named_with_its_value_and_a_remedy(
    words: list[str], expected: list[str], fails: Fails
) -> None:
    text = fails(*words)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("group_sise: 4\n", "unknown option 'group_sise'; did you mean 'group_size'?"),
        ("group_size: 1\n", "group_size=1: a group needs at least two completions to compare"),
        ("steps: many\n", "steps='many': Input should be a valid integer"),
        ("- a\n- b\n", "must hold `option: value` lines, got a list"),
        ("steps: {\n", "is not YAML"),
        ("1: 2\n", "unknown option '1'"),
    ],
)
@pytest.mark.row("R-26", "wrong YAML")
def test_a_wrong_config_file_is_named_with_the_line_that_is_wrong(
    content: str, expected: str, fails: Fails, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    text = fails("--config", str(path))
    assert str(path) in text and expected in text


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "rows.jsonl"),
        (["{bad json"], "rows.jsonl:1"),
        ([*sums(20), '{"prompt": "x", "answer"'], "rows.jsonl:21"),
        ([*sums(3), '{"prompt": 7, "answer": "1"}', *sums(20)], "rows.jsonl:4"),
        ([*sums(3), '{"prompt": null, "answer": "1"}', *sums(20)], "rows.jsonl:4"),
        ([{"sum": "x", "answer": "1"}] * 20, "prompt"),
        ([{"prompt": f"0{i % 10}+01="} for i in range(20)], "needs 'answer'"),
        ([{"prompt": "1" * 100, "answer": "1"}] * 20, "rows.jsonl"),  # longer than the model's context
    ],
    ids=["empty", "not JSON", "cut off", "a number", "null", "no prompt column", "no column of the reward", "too long"],
)
@pytest.mark.row("R-27", "unusable files")
def test_unusable_data_is_named_with_file_and_line(
    rows: list[Any], expected: str, fails: Fails, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    assert expected in fails(data=path, eval_prompts=0)


def test_data_that_is_not_there_is_named(fails: Fails) -> None:
    assert "no such file: absent.jsonl" in fails(data="absent.jsonl")


# --- rewards ------------------------------------------------------------------------------------------------------

REWARDS = """
def short(completions):
    return [1.0] * (len(completions) - 1)

def one_number(completions):
    return 1.0

def text(completions):
    return ["good"] * len(completions)

def needs_gold(completions, gold):
    return [1.0] * len(completions)

class Exits:
    def __init__(self):
        raise SystemExit(0)

class Raises:
    def __init__(self):
        raise OSError("no judge \x1b[2J")

class Needs:
    needs = 5
    def __call__(self, completions):
        return [1.0] * len(completions)

for function in (one_number, text):
    function.isolated = False
"""


@pytest.fixture
def bad_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("bad_rewards", None)


@pytest.mark.usefixtures("bad_rewards")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "short",
            ["'short' returned 1 values for 2 completions; return one float or None per completion"],
        ),  # in a worker process, as a reward of one's own runs
        ("one_number", ["'one_number'"]),
        ("text", ["'text'"]),
        ("needs_gold", ["'needs_gold' needs 'gold'", "answer"]),
        ("Needs", ["needs=5 of reward 'needs' must be a sequence of column names"]),
    ],
)
@pytest.mark.row("R-17", "returns of the wrong shape before training")
def test_a_reward_that_returns_the_wrong_thing_is_named(name: str, expected: list[str], fails: Fails) -> None:
    text = fails("--rewards", f"bad_rewards:{name}")
    for part in expected:
        assert part in text


@pytest.mark.usefixtures("bad_rewards")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Exits", ["reward 'bad_rewards:Exits' cannot be made with parameters {}", "SystemExit: 0"]),
        ("Raises", ["reward 'bad_rewards:Raises' cannot be made", r"OSError: no judge \x1b[2J"]),
    ],
)
def test_a_reward_that_fails_while_it_is_made_is_named(name: str, expected: list[str], fails: Fails) -> None:
    text = fails("--rewards", f"bad_rewards:{name}", quotes=True)
    for part in expected:
        assert part in text


@pytest.mark.parametrize("line", ["sys.exit(0)", "raise SystemExit('x')", "raise type('Own', (BaseException,), {})"])
@pytest.mark.parametrize(("option", "what"), [("--rewards", "reward"), ("--loss", "loss")])
def test_a_module_that_leaves_while_it_is_imported_is_named(
    option: str, what: str, line: str, fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(f"import sys\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = fails(option, "leaving:thing", quotes=True)
    assert f"importing 'leaving' for {what} 'leaving:thing' failed" in text
    assert line in text


# --- models and folders -------------------------------------------------------------------------------------------


def copy_of_builtin(tmp_path: Path) -> Path:
    shutil.copytree(builtin_model_path(), tmp_path / "model")
    return tmp_path / "model"


def test_a_model_folder_without_weights_is_named(fails: Fails, tmp_path: Path) -> None:
    folder = copy_of_builtin(tmp_path)
    (folder / "model.safetensors").unlink()
    assert f"model folder {folder} holds no weights; gruppo reads *.safetensors only" in fails(model=folder)


@pytest.mark.row("R-44", "a folder with a pickle only")
def test_a_model_folder_with_pickles_is_named_and_not_opened(fails: Fails, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "canary",))

    folder = copy_of_builtin(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert "only pickled weights (pytorch_model.bin), which can run code when loaded" in fails(model=folder)
    assert not (tmp_path / "canary").exists()


def test_a_model_that_is_not_there_is_named(fails: Fails) -> None:
    assert "model './nowhere' is neither a folder nor a hub id" in fails(model="./nowhere")


def test_a_model_folder_with_an_unknown_architecture_is_named(fails: Fails, tmp_path: Path) -> None:
    folder = copy_of_builtin(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "no_such_type"}
    (folder / "config.json").write_text(json.dumps(config))
    assert str(folder) in fails(model=folder)


@pytest.mark.row("R-07", "train into a run")
def test_an_output_folder_in_use_is_left_to_the_byte(fails: Fails, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000005").mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 5\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    before = tree_hash(run)
    text = fails()
    assert f"output='{run}' exists already; nothing was touched. Go on with `gruppo resume {run}`" in text
    assert tree_hash(run) == before


@pytest.mark.parametrize("name", ["file/below", "n" * 300, "nul\0byte"])
@pytest.mark.row("R-47", "a file in the way, 300 characters, NUL")
def test_an_output_that_cannot_be_a_folder_is_named(name: str, fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "output=" in fails(output=f"{tmp_path}/{name}")


UNSEEN = {"newline": "a\nb", "escape": "\x1b[2J", "right to left": "a\u202egpj", "blank": " ", "blank end": "run "}


@pytest.mark.parametrize("name", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.row("R-47", "names with controls, direction marks and blanks")
def test_an_output_whose_name_cannot_be_read_is_refused(name: str, fails: Fails, tmp_path: Path) -> None:
    text = fails(output=f"{tmp_path}/{name}/run")
    assert "would make a folder" in text and text.count("choose another") == 1
    assert "\x1b" not in text and "\u202e" not in text


def test_resume_of_something_else_is_named(fails: Fails, tmp_path: Path) -> None:
    assert "is not a run directory: it has no config.yaml" in fails(str(tmp_path), verb="resume")
    assert "is not a run directory: it has no config.yaml" in fails(str(tmp_path / "absent"), verb="resume")


def test_resume_of_a_run_whose_config_was_damaged_is_named(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("group_size: 1\n")
    assert "group_size=1" in fails(str(tmp_path), verb="resume")


def test_a_model_that_fails_to_load_leaves_the_output_free(
    tmp_path: Path, flags: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of_builtin(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags(tmp_path / "run", model=folder)])
    assert ended.value.code == 2
    assert str(folder) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- as a process -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.row("R-26", "a wrong flag of a real process")
def test_the_process_exits_2_quickly_and_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gruppo", "train", "--group-size", "1", "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 2
    assert "group_size" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


# --- tokenizers and templates that do not go with the model ---------------------------------------------------------


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def extended(tmp_path: Path, content: str = "Z") -> Path:
    """The embedded model with a token more in its tokenizer: id 16, where the model has embeddings for 16."""
    folder = copy_of_builtin(tmp_path)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = {"id": 16, "content": content} | plain
    edit(folder / "tokenizer.json", lambda values: values["added_tokens"].append(added))
    return folder


FOREIGN = "token 16 ('Z'), and the model has embeddings for 16 tokens, 0 to 15"


def test_a_token_beyond_the_embedding_is_named_before_a_model_is_made(fails: Fails, tmp_path: Path) -> None:
    folder = extended(tmp_path)
    rows = sums(40)
    rows[5]["prompt"] = "1Z+2="
    data = jsonl(tmp_path / "rows.jsonl", *rows)
    assert f"prompt 5 has {FOREIGN}" in fails(model=folder, data=data)
    held_out = jsonl(tmp_path / "held_out.jsonl", *sums(8), {"prompt": "Z", "answer": "1"})
    plain = jsonl(tmp_path / "plain.jsonl", *sums(40))
    assert f"prompt 8 has {FOREIGN}" in fails(model=folder, data=plain, eval_data=held_out)


@pytest.mark.parametrize("words", [["sample", "1Z+2="], ["eval", "--data", "rows.jsonl"]])
def test_sample_and_eval_refuse_a_token_beyond_the_embedding(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1Z+2=", "answer": "3"})
    more = ["--rewards", "exact_match"] if words[0] == "eval" else []
    with pytest.raises(SystemExit) as ended:
        main([*words, *more, "--model", str(extended(tmp_path)), "--max-new-tokens", "2"])
    assert ended.value.code == 2
    assert FOREIGN in " ".join(capsys.readouterr().err.split())


def test_an_added_token_that_no_prompt_holds_is_no_reason_to_refuse_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3 without images has one: the tokenizer is that of its larger sisters."""
    folder = extended(tmp_path, content="<image>")
    with pytest.raises(SystemExit) as ended:
        main(["sample", "1+2=", "--model", str(folder), "--max-new-tokens", "2"])
    assert ended.value.code == 0
    assert "1+2= ->" in capsys.readouterr().out


TEMPLATES = {
    "{{ '' }}": ":1: the chat template makes an empty prompt of it",
    "{{ 1 / 0 }}": ":1: the chat template fails on the conversation: ZeroDivisionError: division by zero; use",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_makes_no_prompt_is_refused_before_anything_is_written(
    template: str, fails: Fails, tmp_path: Path
) -> None:
    folder = copy_of_builtin(tmp_path)
    edit(folder / "tokenizer_config.json", lambda values: values.update(chat_template=template))
    data = jsonl(tmp_path / "rows.jsonl", *sums(20))
    assert TEMPLATES[template] in fails("--chat", model=folder, data=data)
