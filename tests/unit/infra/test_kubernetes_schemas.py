"""Every manifest fits its schema."""

from pathlib import Path

import pytest
import yaml

from tests.support.manifests import KUBERNETES, OVERLAYS, VERSIONS, complaints, parse, render, rendered_text, the


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """All objects of an overlay fit their schemas; unknown fields are errors."""
    things = render(overlay)

    wrong = {f"{thing['kind']}/{thing['metadata']['name']}": complaints(thing, version) for thing in things}

    assert len(things) > 15
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_canary_component_fits_every_overlay(tmp_path: Path) -> None:
    """With the component, the service is valid and moves traffic in steps."""
    up = Path(*[".."] * len(tmp_path.parts[1:]))
    names = {
        kind: (up / KUBERNETES.relative_to("/") / kind).as_posix() for kind in ("overlays/prod", "components/canary")
    }
    kustomization = {"resources": [names["overlays/prod"]], "components": [names["components/canary"]]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))

    things = parse(rendered_text(tmp_path))
    service = the(things, "RayService")

    assert complaints(service, VERSIONS[-1]) == []
    assert service["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
