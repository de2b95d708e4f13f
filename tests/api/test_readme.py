"""The README is true: its tree names every source file and nothing else, its Python runs, its files exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tree_names_every_source_file_and_nothing_else():
    named, folders = set(), []
    for line in README.split("```\nsrc/gruppo/\n")[1].split("```")[0].splitlines():
        if not line.startswith(" "):
            break
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = [*folders[: depth - 1], name]
        if name.endswith(".py"):
            named.add("".join(folders))
    source = ROOT / "src" / "gruppo"
    there = {p.relative_to(source).as_posix() for p in source.rglob("*.py") if p.name != "__init__.py"}
    assert named == there


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
