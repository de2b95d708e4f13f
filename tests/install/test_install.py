"""Installation as printed: the wheel from nothing runs the demo, every extra resolves, the hints of errors work."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from gruppo.errors import require

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gruppo"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINED = ["--constraint", str(ROOT / "constraints.txt")]
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
in_one_environment = pytest.mark.xdist_group("installed")
"""Tests that share the environment of the wheel, which takes a minute to make."""

BROUGHT = {
    "train": "transformers",
    "math": "math-verify",
    "data": "datasets",
    "tasks": "reasoning-gym",
    "vllm": "vllm",
    "qlora": "bitsandbytes",
    "gguf": "gguf",
    "ray": "ray",
    "modelscope": "modelscope",
    "wandb": "wandb",
    "trackio": "trackio",
    "docs": "mkdocs-material",
    "dev": "pytest",
}
"""A package of each extra."""


def run(words: Sequence[str | Path], folder: Path) -> str:
    """Standard output of a command in a folder, without anything of this environment."""
    ours = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def resolved(report: Path) -> set[str]:
    """The packages that a dry run would have installed, spelt as in pyproject.toml."""
    entries = json.loads(report.read_text())["install"]
    return {entry["metadata"]["name"].lower().replace("_", "-") for entry in entries}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that was empty before the wheel came."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run([folder / "bin" / "python", *PIP, "install", *CONSTRAINED, f"{wheel}[train]"], folder)
    return folder / "bin"


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = {f"gruppo/{p.relative_to(SOURCE)}" for p in SOURCE.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("gruppo/")} == files
    assert {"gruppo/recipes/book.yaml", "gruppo/task/builtin_model/model.safetensors", "gruppo/py.typed"} <= files


@in_one_environment
def test_the_wheel_from_nothing_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    said = run([installed / "gruppo", "demo"], tmp_path)
    before, after = map(float, re.findall(r"never trained on: (\S+) -> (\S+)", said)[0])
    assert before < 0.4 and after > 0.9
    where = run([installed / "python", "-c", "import gruppo; print(gruppo.__file__)"], tmp_path)
    assert not where.startswith(str(ROOT)) and (tmp_path / "runs" / "demo" / "learning_curve.png").is_file()
    assert "dapo" in run([installed / "gruppo", "recipes"], tmp_path)


def test_every_extra_is_tried_here() -> None:
    assert BROUGHT.keys() == EXTRAS.keys()


@pytest.mark.parametrize("extra", sorted(BROUGHT.keys() - {"train", "dev"}))  # those two are installed for real
def test_an_extra_resolves_in_an_empty_environment(extra: str, wheel: Path, tmp_path: Path) -> None:
    # vLLM pins torch and numpy itself, to others than constraints.txt does.
    constraints = [] if extra == "vllm" else CONSTRAINED
    wanted = f"gruppo[{extra}] @ {wheel.as_uri()}"
    report = tmp_path / "report.json"
    dry = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
    run([sys.executable, *PIP, *dry, *constraints, wanted], tmp_path)
    names = resolved(report)
    assert {"gruppo", "torch", BROUGHT[extra]} <= names


@in_one_environment
@pytest.mark.parametrize("extra", ["math", "vllm", "modelscope", "wandb"])
def test_the_command_that_an_error_prints_works_where_gruppo_is_installed(
    extra: str, installed: Path, tmp_path: Path
) -> None:
    command = str(require(extra, BROUGHT[extra], "this")).partition("; ")[2]
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    report = tmp_path / "report.json"
    dry = ["install", "--dry-run", "--report", str(report)]
    run([installed / "python", *PIP, *dry, *words[2:]], tmp_path)
    names = resolved(report)
    assert BROUGHT[extra] in names and "gruppo" not in names  # the one that is there stays


@in_one_environment
def test_a_base_in_4_bits_trains_with_the_extra_installed(installed: Path, tmp_path: Path) -> None:
    tools = ["pytest", "pytest-timeout", "hypothesis"]
    run([installed / "python", *PIP, "install", *CONSTRAINED, "gruppo[qlora]", *tools], tmp_path)
    tests = ROOT / "tests" / "unit" / "model" / "test_model_adapters.py"
    said = run([installed / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests], tmp_path)
    assert re.search(r"\d\d passed, 1 skipped", said)  # the one that needs bitsandbytes absent
