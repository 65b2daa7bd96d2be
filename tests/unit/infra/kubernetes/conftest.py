"""Fixtures that render each overlay."""

from typing import Any

import pytest

from tests.support.manifests import OVERLAYS, render


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def things(overlay: str) -> list[dict[str, Any]]:
    return render(overlay)
