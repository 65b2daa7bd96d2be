"""Every manifest is valid, and what is not would be found. `pytest tests/unit/infra/test_kubernetes_schemas.py`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.manifests import KUBERNETES, OVERLAYS, VERSIONS, complaints, find, parse, render, rendered_text, the


def changed(thing: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one field set, the way to it given with dots."""
    copied = copy.deepcopy(thing)
    *way, last = path.split(".")
    place: Any = copied
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    place[last] = value
    return copied


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """All objects of an overlay fit their schemas, where unknown fields are errors."""
    things = render(overlay)

    wrong = {f"{thing['kind']}/{thing['metadata']['name']}": complaints(thing, version) for thing in things}

    assert len(things) > 15
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayService", "spec.rayClusterConfig.headGroupSpecs", {}),
        ("RayService", "spec.rayClusterConfig.workerGroupSpecs.0.minReplicas", "two"),
        ("RayService", "spec.rayClusterConfig.workerGroupSpecs.0.rayStartParams.num-cpus", 4),
        ("RayService", "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.contaners", []),
        ("RayService", "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.envFroms", []),
        ("RayService", "spec.rayClusterConfig.gcsFaultToleranceOptions.redisAdress", "x"),
        ("RayService", "spec.rayClusterConfig.authOptions.mode", "none"),
        ("RayService", "spec.upgradeStrategy.type", "Canary"),
        ("RayService", "spec.rayClusterDeletionDelaySeconds", "soon"),
        ("RayService", "apiVersion", "ray.io/v1alpha1"),
        ("PodMonitor", "spec.podMetricsEndpoints.0.intervall", "10s"),
        ("PodMonitor", "spec.podMetricsEndpoints.0.interval", "ten seconds"),
        ("PrometheusRule", "spec.groups.0.rules.0.exprs", "1"),
        ("PrometheusRule", "spec.groups.0.name", ""),
        ("StatefulSet", "spec.template.spec.containers.0.imagePullPolicy", ["Never"]),
        ("CronJob", "spec.schedules", "* * * * *"),
        ("PersistentVolumeClaim", "spec.accessMode", ["ReadWriteMany"]),
        ("Namespace", "metadata.label", {}),
    ],
)
def test_a_slip_is_found(kind: str, path: str, value: object) -> None:
    """One misspelt field or one value of a wrong type is a complaint, in every kind of object."""
    thing = find(render("prod"), kind)[0]

    assert complaints(thing, VERSIONS[-1]) == []
    assert complaints(changed(thing, path, value), VERSIONS[-1]) != []


@pytest.mark.parametrize("missing", ["rayClusterConfig", "serveConfigV2"])
def test_a_missing_part_is_found(missing: str) -> None:
    """What a RayService must have is required; what it may leave out is not."""
    service = the(render("prod"), "RayService")

    del service["spec"][missing]

    assert bool(complaints(service, VERSIONS[-1])) == (missing == "rayClusterConfig")


def test_the_canary_component_fits_every_overlay(tmp_path: Path) -> None:
    """With the component, an overlay's service is still valid and moves traffic in steps."""
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
