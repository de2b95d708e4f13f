"""README is true: its Python runs, its files exist, the site begins as it does. Generated pages are current."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RUN = re.compile(r"```python\n(from gruppo\.trainer .*?)```\n\n```text\n(.*?)```", re.S)
"""The run of the first screen: its code, and what it prints."""


def generated():
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.PAGES


@pytest.mark.parametrize("name", list(generated()))
def test_generated_pages_are_current(name):
    """`make docs` writes them."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generated()[name]()


def test_the_map_names_every_package():
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`gruppo\.(\w+)`", page.split("| package |")[1].split("\n\n")[0]))
    source = ROOT / "src" / "gruppo"
    there = {p.name for p in source.iterdir() if (p / "__init__.py").is_file()}
    assert there - named == set()
    assert all((source / name).is_dir() or (source / f"{name}.py").is_file() for name in named)


def test_it_is_short():
    """15 lines of Python and 5 of shell for a run of one's own, counted without blank lines."""
    assert len(README.splitlines()) <= 110
    python, _ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (shell,) = (block for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) if "gruppo train" in block)
    assert len([line for line in python.splitlines() if line]) <= 15 and len(shell.splitlines()) == 5


def test_it_names_the_two_commands_of_a_newcomer():
    shell = "".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))
    assert re.search(r"^make demo ", shell, re.M) and "`make test`" in README


def test_the_first_page_of_the_site_begins_with_the_same_words_and_the_same_run():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert README.split("\n\n")[1].split() == index.split("\n\n")[1].split()
    assert RUN.findall(index) == RUN.findall(README)


def test_the_quickstart_names_every_extra_of_a_user():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    install = (ROOT / "docs" / "quickstart.md").read_text().split("## Install")[1].split("\n## ")[0]
    named = set(re.findall(r"`\[?(\w+)\]?`", install)) | {"vllm"}  # which has a page of its own
    assert extras - {"dev", "docs"} <= named


def test_files_and_links_that_it_names_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:examples|benchmarks)/[\w.]+)`", README)
    assert len(links) >= 12
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_python_runs_and_prints_the_formula(capsys):
    _, code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    assert "-min(r*A, clip(r, 0.9997, 1.0004)*A)" in capsys.readouterr().out
    # ratio 1 everywhere: minus the mean advantage, which is 0 for whole groups
    assert abs(namespace["output"].loss.item()) < 1e-6
    assert namespace["advantages"][4].item() == 1.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what starts a worker process
def test_its_run_of_python_objects_trains(tmp_path, monkeypatch, capsys):
    ((code, promised),) = RUN.findall(README)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "notebook"})
    assert capsys.readouterr().out == promised
    assert (tmp_path / "runs/mine/model/model.safetensors").is_file()
