"""Tests on several ranks that take minutes run where they are named: `make test-ranks`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not {"ranks", "row"} & set(config.option.markexpr.split()):
        for item in items:
            if "ranks" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes; `make test-ranks` runs it"))
