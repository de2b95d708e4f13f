"""Tests of the installation run where they are asked for, `make test-install`: they fetch packages."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "install" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("install"):
                item.add_marker(pytest.mark.skip(reason="fetches packages; `make test-install` runs it"))
