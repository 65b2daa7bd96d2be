"""Fixtures that render each overlay."""

from typing import Any

import pytest

from tests.support.manifests import OVERLAYS, render


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    """The overlay's name."""
    return str(request.param)


@pytest.fixture
def things(overlay: str) -> list[dict[str, Any]]:
    """The overlay's objects."""
    return render(overlay)
