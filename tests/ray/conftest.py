"""Fixtures that start a Ray cluster. The tests are skipped if Ray is not installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from ray_support import Fleet


@pytest.fixture(scope="session")
def _ray_is_installed():
    try:
        importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Ray is not installed here: make ray, then make test-ray")


@pytest.fixture(scope="session")
def cluster(_ray_is_installed, tiny_model):
    """Yield a Ray cluster of two raylets that runs Ray Serve without an application."""
    fleet = Fleet(tiny_model)
    yield fleet
    fleet.close()
