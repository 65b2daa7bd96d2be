"""Every manifest fits its schema."""

import pytest

from tests.support.manifests import OVERLAYS, VERSIONS, complaints, render


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """All objects of an overlay fit their schemas; unknown fields are errors."""
    things = render(overlay)

    wrong = {f"{thing['kind']}/{thing['metadata']['name']}": complaints(thing, version) for thing in things}

    assert len(things) > 15
    assert {name: found for name, found in wrong.items() if found} == {}
