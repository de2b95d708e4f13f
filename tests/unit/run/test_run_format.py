"""The format of a run directory: one of another version is named, with both versions and what can be done."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gruppo import __version__
from gruppo.cli.main import run as gruppo
from gruppo.errors import InputError
from gruppo.run.reader import FORMAT
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 2, "steps": 2, "eval_prompts": 0}
SMALL |= {"tensorboard": False, "threads": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format") / "run"
    GRPOTrainer(TrainConfig(output=str(folder), **SMALL), quiet=True).train()
    return folder


def of_before(run: Path) -> None:
    """As versions before the number wrote it: without origin.json, and with other keys in its checkpoints."""
    (run / "origin.json").unlink()
    change(run / "env.json", lambda facts: facts.pop("format"))
    change(run / "env.json", lambda facts: facts["packages"].update(gruppo="0.0.7"))
    folder = run / "checkpoints" / "step-000002"
    change(folder / "trainer.json", lambda facts: [facts.pop(name) for name in ("kl_coefficient", "ended")])
    text = (run / "config.yaml").read_text()
    assert "lora_rank: null\n" in text
    (run / "config.yaml").write_text(text.replace("lora_rank: null", "lora_rank: 8") + "an_option_of_then: true\n")


def of_later(run: Path) -> None:
    change(run / "env.json", lambda facts: facts.update(format=FORMAT + 1))
    change(run / "env.json", lambda facts: facts["packages"].update(gruppo="9.0"))


def change(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads(file.read_text())
    edit(facts)
    file.write_text(json.dumps(facts))


def test_a_run_says_in_which_format_and_by_what_version_it_was_written(trained: Path) -> None:
    facts = json.loads((trained / "env.json").read_text())
    assert (facts["format"], facts["packages"]["gruppo"]) == (1, __version__)


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize(("make", "version", "number"), [(of_before, "0.0.7", 0), (of_later, "9.0", FORMAT + 1)])
def test_a_run_of_another_format_is_named_and_left_as_it_is(
    make: Callable[[Path], None], version: str, number: int, accept: bool, trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    make(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = (
        f"{run} was written by gruppo {version} in run format {number} and cannot be resumed by gruppo {__version__}, "
        f"which has run format {FORMAT}; nothing was touched. gruppo report, view, sample and export still read it, "
        f"and gruppo train --model {run}/model trains on from its model"
    )
    with pytest.raises(InputError) as error:
        gruppo(["resume", str(run), "--steps", "3", *(["--accept-changes"] if accept else [])])
    assert str(error.value) == said
    with pytest.raises(InputError) as error:
        GRPOTrainer(TrainConfig.of_run(run), resume=True, accept_changes=accept, quiet=True)
    assert str(error.value) == said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_the_sentence_says_still_works_does(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    of_before(run)
    assert gruppo(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert gruppo(["sample", "--model", str(run / "model"), "1+1="]) == 0
    assert gruppo(["export", str(run), str(tmp_path / "exported")]) == 0
    output = ["--output", str(tmp_path / "on"), "--no-tensorboard", "--eval-prompts", "0", "--steps", "1"]
    small = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "2"]
    assert gruppo(["train", "--model", str(run / "model"), *output, *small]) == 0


def test_a_lost_environment_is_no_other_format(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "env.json").unlink()
    result = GRPOTrainer(TrainConfig.of_run(run, {"steps": 3}), resume=True, quiet=True).train()
    assert (result.status, result.step) == ("done", 3)
