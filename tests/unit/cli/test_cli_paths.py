"""Paths on the command line: ~ is written out for every verb, and a home that is not known is refused."""

from pathlib import Path

import pytest

from gruppo.cli.main import run
from gruppo.errors import InputError
from gruppo.task.builtin import builtin_model_path

SMALL = ["--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--eval-prompts", "2"]
NOBODY = "~nosuchuser/x"


@pytest.mark.parametrize(
    "words",
    [
        ["train", *SMALL, "--output", NOBODY],
        ["train", *SMALL, "--data", NOBODY],
        ["train", "--config", f"{NOBODY}.yaml"],
        ["demo", "--rebuild-base", NOBODY],
        ["resume", NOBODY],
        ["report", NOBODY],
        ["view", NOBODY],
        ["eval", NOBODY],
        ["doctor", NOBODY],
        ["replay", NOBODY, "--step", "1"],
        ["convert", "trl", f"{NOBODY}.yaml"],
        ["convert", "open_instruct", f"{NOBODY}.json"],
        ["sample", "1+1=", "--run", NOBODY],
        ["sample", "1+1=", "--output", f"{NOBODY}.parquet"],
        ["export", str(builtin_model_path()), NOBODY],
    ],
    ids=lambda words: " ".join(words[:3])[:30],
)
def test_a_home_that_is_not_known_is_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        run(words)
    assert "no home folder is known for ~nosuchuser; write the path out" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_for_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for words in (
        ["train", *SMALL, "--output", "~/run"],
        ["export", "~/run", "~/ex"],
        ["sample", "1+1=", "--run", "~/run", "--max-new-tokens", "2", "--output", "~/s.parquet"],
        ["report", "~/run", "--output", "~/r.html"],
        ["eval", "~/run"],
        ["eval", "~/run", "--output", "~/e.parquet"],
    ):
        assert run(words) == 0
    made = {"run", "ex", "s.parquet", "r.html", "e.parquet"}
    assert {path.name for path in (tmp_path / "home").iterdir()} == made
    assert (tmp_path / "home" / "ex" / "model.safetensors").is_file()
    assert (tmp_path / "home" / "run" / "eval.parquet").is_file()
    assert list((tmp_path / "here").iterdir()) == []
