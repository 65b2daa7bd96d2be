"""Every manifest fits its schema."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import VERSIONS, complaints, with_component


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(things: list[dict[str, Any]], version: str) -> None:
    """All objects of an overlay fit their schemas; unknown fields are errors."""
    assert len(things) > 15
    assert [found for thing in things for found in complaints(thing, version)] == []


@pytest.mark.parametrize(("upon", "component"), [("dev", "text"), ("gpu", "text-gpu"), ("prod", "canary")])
def test_a_component_leaves_every_object_valid(upon: str, component: str, tmp_path: Path) -> None:
    """So does each component upon an overlay."""
    things = with_component(upon, component, tmp_path)

    assert [found for thing in things for found in complaints(thing, VERSIONS[-1])] == []
