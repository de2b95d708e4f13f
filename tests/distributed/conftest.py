"""Tests on several ranks and on Ray that take minutes run where they are named: `make test-ranks`, `make test-ray`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = set(config.option.markexpr.split())
    for item in items:
        for mark, others in (("ranks", {"row"}), ("ray", set())):
            if item.get_closest_marker(mark) and not named & {mark, *others}:
                item.add_marker(pytest.mark.skip(reason=f"takes minutes; `make test-{mark}` runs it"))
