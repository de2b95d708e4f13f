"""Writes the generated parts of the documentation; `make docs` runs it and a test holds the pages to it.

docs/map.md       every module with the first sentence of its docstring
docs/metrics.md   the tables between `<!-- keys: ... -->` and `<!-- end -->`, from `gruppo.keys`
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from gruppo.keys import KEYS, Key

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gruppo"
DOCS = ROOT / "docs"

HEADER = """# Map of the source

Generated from the modules' docstrings by `make docs`; a test holds it to them. The pipeline is the tree: prompts →
rollouts → rewards → advantages → packed batch → log-probs → loss → step → metrics.
"""


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def map_page() -> str:
    packages = sorted({path.parent for path in SOURCE.rglob("*.py")})
    parts = [HEADER]
    for package in packages:
        name = package.relative_to(SOURCE.parent).as_posix()
        modules = sorted(p for p in package.glob("*.py") if p.name not in ("__init__.py", "__main__.py"))
        parts.append(f"\n## {name}\n\n{first_line(package / '__init__.py')}\n")
        if modules:
            parts.append("\n| file | |\n|---|---|\n")
            parts += [f"| `{path.name}` | {first_line(path).replace('|', '&#124;')} |\n" for path in modules]
    return "".join(parts)


def table(head: str, rows: Iterable[str]) -> str:
    return f"| {head} |\n|{'---|' * (head.count('|') + 1)}\n" + "".join(f"| {row} |\n" for row in rows)


def run_table() -> str:
    rows = (f"`{k.name}` | {k.what} | {k.over} | {k.expect} | {k.reduce}" for k in KEYS)
    return table("key | what it is | over | expect | values combine by", rows)


def formula_table(prefix: str, shown_as: str) -> str:
    chosen: list[Key] = [key for key in KEYS if key.name.startswith(prefix) and key.formula]
    rows = (f"`{k.name.replace(prefix, shown_as)}` | {k.formula} | {k.expect}" for k in chosen)
    return table("key | formula | expect", rows)


def metrics_page() -> str:
    tables = {
        "run": run_table(),
        "train": formula_table("live/", "train/"),
        "sampler": formula_table("sampler/", "sampler/"),
    }
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for name, made in tables.items():
        pattern = rf"(<!-- keys: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda m, made=made: f"{m[1]}\n{made}\n{m[2]}", text, flags=re.S)
        assert found == 1, name
    return text


PAGES = {"map.md": map_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")
