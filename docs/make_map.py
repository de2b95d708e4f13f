"""Writes docs/map.md: every module of the package with the first line of its docstring. `make map` runs it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gruppo"
PAGE = ROOT / "docs" / "map.md"

HEADER = """# Map of the source

Generated from the modules' docstrings by `make map`; a test holds it to them. The pipeline is the tree: prompts →
rollouts → rewards → advantages → packed batch → log-probs → loss → step → metrics.
"""


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {page().count('| `')} modules")
