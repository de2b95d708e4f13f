"""The examples in the docstrings of the core run and print what they say."""

import doctest
import pkgutil
from importlib import import_module

import pytest

PACKAGES = ("advantage", "batch", "parallel", "kernel", "loss", "metric")


def modules():
    names = ["gruppo.types", "gruppo.errors", "gruppo.process.by_name", "gruppo.run.console", "gruppo.trainer.state"]
    for package in PACKAGES:
        path = import_module(f"gruppo.{package}").__path__
        names += [f"gruppo.{package}", *(m.name for m in pkgutil.iter_modules(path, f"gruppo.{package}."))]
    return names


def examples(name):
    return [t for t in doctest.DocTestFinder(exclude_empty=True).find(import_module(name)) if t.examples]


WITH_EXAMPLES = {name: found for name in modules() if (found := examples(name))}


@pytest.mark.parametrize(
    ("module", "example"),
    [(name, e) for name, found in WITH_EXAMPLES.items() for e in found],
    ids=[e.name for found in WITH_EXAMPLES.values() for e in found],
)
def test_example_of_a_docstring(module, example):
    printed = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)


def test_the_examples_of_the_public_entry_points_were_found():
    names = {e.name for found in WITH_EXAMPLES.values() for e in found}
    assert {
        "gruppo.loss",
        "gruppo.types",
        "gruppo.batch.packed.pack",
        "gruppo.batch.packed.Totals",
        "gruppo.advantage.baseline.GRPOAdvantage",
        "gruppo.kernel.logps.logps_and_entropy",
    } <= names
