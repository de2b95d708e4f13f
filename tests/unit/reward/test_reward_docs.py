"""The examples in the docstrings hold."""

import doctest
import importlib
import pkgutil

import gruppo.reward


def test_every_example_in_the_reward_stage_holds():
    names = [module.name for module in pkgutil.iter_modules(gruppo.reward.__path__)]
    results = [doctest.testmod(importlib.import_module(f"gruppo.reward.{name}")) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 14
