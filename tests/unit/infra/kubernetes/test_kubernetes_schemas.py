"""Every manifest fits its schema."""

from pathlib import Path

import pytest

from tests.support.manifests import OVERLAYS, VERSIONS, complaints, render, with_component


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """All objects of an overlay fit their schemas; unknown fields are errors."""
    things = render(overlay)

    wrong = {f"{thing['kind']}/{thing['metadata']['name']}": complaints(thing, version) for thing in things}

    assert len(things) > 15
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(("overlay", "component"), [("dev", "text"), ("gpu", "text-gpu"), ("prod", "canary")])
def test_a_component_leaves_every_object_valid(overlay: str, component: str, tmp_path: Path) -> None:
    """So does each component upon an overlay."""
    things = with_component(overlay, component, tmp_path)

    assert [found for thing in things if (found := complaints(thing, VERSIONS[-1]))] == []
