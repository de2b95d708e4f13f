"""`--ray`: what the flags are read as, and what is refused before a cluster is touched."""

import sys
from pathlib import Path

import pytest

from gruppo.cli.arguments import parse_options
from gruppo.cli.main import run
from gruppo.cli.train import TrainArguments
from gruppo.errors import InputError, MissingExtraError


def test_the_flags_stand_among_the_options_of_the_run() -> None:
    words = ["--steps", "3", "--ray", "auto", "--ranks=2", "--samplers", "1", "--max_restarts", "5", "--lora"]
    given, options = parse_options(TrainArguments, words, "train")
    assert given == TrainArguments(ray="auto", ranks=2, samplers=1, max_restarts=5)
    assert options == {"steps": 3, "lora": True}


@pytest.mark.parametrize(("words", "told"), [
    (["--ranks", "2"], "--ranks is for a run on a Ray cluster; add --ray auto"),
    (["--max-restarts", "2"], "--max-restarts is for a run on a Ray cluster"),
    (["--ray", "auto", "--ranks", "two"], "ranks='two': Input should be a valid integer"),
    (["--ray", "auto", "--ranks", "0"], "ranks=0: Input should be greater than or equal to 1"),
    (["--ray", "auto", "--samplers", "-1"], "samplers=-1: Input should be greater than or equal to 0"),
    (["--ray", "ray://host:10001"], "the command runs on a machine of the cluster"),
    (["--ray"], "--ray: expected one argument"),
    (["--ray", "auto", "--samplers", "2", "--sampler", "vllm:http://a:8000"], "are vLLM servers, and the run"),
    (["--ray", "auto", "--samplers", "2", "--sampler", "vllm"], "are vLLM servers, and the run has sampler='vllm'"),
    (["--ray", "auto", "--samplers", "2"], "are vLLM servers, and the run has sampler='torch'"),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["train", "resume"])
def test_what_cannot_go_together_is_refused(verb: str, words: list[str], told: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    if verb == "resume":
        if "are vLLM servers" in told:
            pytest.skip("of the config of a run, which is not there")
        command = ["resume", str(output), *words]
    else:
        command = ["train", "--output", str(output), *words]
    with pytest.raises(InputError, match=told.replace("(", r"\(").replace("[", r"\[")):
        run(command)
    assert not output.exists()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_process_of_another_launcher_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match=f"--ray starts the ranks itself, and {name}=1"):
        run(["train", "--ray", "auto", "--output", str(tmp_path / "run")])


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"--ray auto needs 'ray'.*pip install 'gruppo\[ray\]'"):
        run(["train", "--ray", "auto", "--output", str(tmp_path / "run")])


def test_the_demo_has_no_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--ray"):
        run(["demo", "--ray", "auto", "--output", str(tmp_path / "run")])


def test_help_shows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("train", "resume"):
        with pytest.raises(SystemExit):
            run([verb, "--help"])
        shown = capsys.readouterr().out
        assert all(flag in shown for flag in ("--ray", "--ranks", "--samplers", "--max-restarts"))
