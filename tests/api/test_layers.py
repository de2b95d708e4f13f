"""The packages in their order: each imports those before it and none after, not even lazily or for types."""

import ast
from pathlib import Path

import gruppo

ROOT = Path(gruppo.__file__).parent

ORDER = ("errors", "faults", "types", "codec", "process", "keys", "peer_names", "options",
         "batch", "random", "kernel", "loss", "advantage", "parallel", "metric", "reward", "task", "weights", "model",
         "sampler", "turns", "rollout", "run", "doctor", "trainer", "replay", "convert", "recipes", "report", "cli",
         "__main__")  # fmt: skip


def imported(path: Path) -> set[str]:
    """The packages of gruppo that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "gruppo":
            found |= {f"gruppo.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.split(".")[1] for name in found if name.startswith("gruppo.")} - {"__version__"}


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_no_package_imports_one_that_comes_after_it() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports gruppo.{name}"
        for path in ROOT.rglob("*.py")
        if package(path) != "__init__"
        for name in imported(path)
        if ORDER.index(name) > ORDER.index(package(path))
    ]
    assert upward == []


def test_the_order_has_every_package() -> None:
    assert {package(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(ORDER)


def test_an_import_upward_would_be_found(tmp_path: Path) -> None:
    source = (
        "def f():\n    from gruppo.trainer.config import TrainConfig\n\nfrom gruppo import cli\nimport gruppo.loss\n"
    )
    (tmp_path / "module.py").write_text(source)
    assert imported(tmp_path / "module.py") == {"trainer", "cli", "loss"}
