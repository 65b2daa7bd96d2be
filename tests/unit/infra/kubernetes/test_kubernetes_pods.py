"""References of every pod, and what keeps it confined."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifest_references import unresolved
from tests.support.manifests import pods, render, the, with_component

Things = list[dict[str, Any]]


def test_every_pod_is_confined(things: Things) -> None:
    """The namespace enforces restricted Pod Security; each root is read-only; service links would set TAILRACE_X_PORT, which the settings refuse as unknown."""
    assert the(things, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(things):
        assert pod.spec["enableServiceLinks"] is False, pod.name
        assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in pod.containers()), pod.name


def test_every_reference_resolves(overlay: str, things: Things) -> None:
    """Each name of another object, key, volume, port, image, namespace and selector of an overlay is rendered, or made by docs/kubernetes.md."""
    assert unresolved(things) == []
    password = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].get("redisPassword")
    assert (password is None) == (overlay == "dev")


@pytest.mark.parametrize(
    ("upon", "component"),
    [
        *(("dev", one) for one in ("text", "train-workers")),
        ("prod", "object-store"),
        *(("prod", one) for one in ("text", "train-workers")),
        *(("gpu", one) for one in ("text", "text-gpu", "train-workers")),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_every_reference_of_a_component_resolves(upon: str, component: str, is_inside: bool, tmp_path: Path) -> None:
    """Upon an overlay, as the pages write it, and inside one."""
    things = with_component(upon, component, tmp_path, is_inside=is_inside)

    assert unresolved(things) == []
    assert {one["image"].split(":")[0] for pod in pods(things) for one in pod.containers()} >= {"tailrace"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda things: things.remove(the(things, "PersistentVolumeClaim")), "PersistentVolumeClaim tailrace-shared"),
        (lambda things: things.remove(the(things, "Service", "tailrace-ray")), "Service tailrace-ray"),
        (lambda things: the(things, "StatefulSet")["spec"].update(serviceName="none"), "Service none"),
        (lambda things: the(things, "PodMonitor", "tailrace")["metadata"].update(namespace="other"), "namespaces"),
        (lambda things: pods(things)[0].containers()[0].update(image="tailrace"), "without tag"),
        (lambda things: pods(things)[0].spec["volumes"].pop(0), ": volume "),
        (
            lambda things: the(things, "NetworkPolicy", "tailrace-ingress")["spec"]["podSelector"].update(
                matchLabels={"a": "b"}
            ),
            "selects no pod",
        ),
    ],
)
def test_an_unresolved_reference_is_found(change: Callable[[Things], object], complaint: str) -> None:
    """The check itself finds each kind."""
    things = render("prod")
    change(things)

    assert any(complaint in line for line in unresolved(things))
