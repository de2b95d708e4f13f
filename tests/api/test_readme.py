"""The README is true: its table names every package, its Python runs, its files exist. So is the map of the source."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_map_is_that_of_the_modules():
    """`make map` writes it."""
    specification = importlib.util.spec_from_file_location("make_map", ROOT / "docs" / "make_map.py")
    make_map = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(make_map)
    assert (ROOT / "docs" / "map.md").read_text(encoding="utf-8") == make_map.page()


def test_the_table_names_every_package():
    named = set(re.findall(r"`gruppo\.(\w+)`", README.split("## The packages")[1]))
    source = ROOT / "src" / "gruppo"
    there = {p.name for p in source.iterdir() if (p / "__init__.py").is_file()}
    assert there - named == set()


def test_files_and_links_that_it_names_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:examples|benchmarks)/[\w.]+)`", README)
    assert len(links) >= 12
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_python_runs_and_prints_the_formula(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    assert "-min(r*A, clip(r, 0.9997, 1.0004)*A)" in capsys.readouterr().out
    # ratio 1 everywhere: minus the mean advantage, which is 0 for whole groups
    assert abs(namespace["output"].loss.item()) < 1e-6
    assert namespace["advantages"][4].item() == 1.5
