"""References of every pod, and its security settings."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.settings.settings import Settings
from services.stream.__main__ import erasing_files
from tests.support.manifest_references import unresolved
from tests.support.manifests import ROOT, Pod, pod_of, pods, render, settings_of, the, with_component

Things = list[dict[str, Any]]


def test_every_pod_is_confined(things: Things) -> None:
    """Pods run under restricted Pod Security, with read-only roots and without service links (unknown settings)."""
    assert the(things, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(things):
        assert pod.spec["enableServiceLinks"] is False, pod.name
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in pod.containers()), pod.name


def test_no_runtime_makes_a_folder_within_a_volume(things: Things) -> None:
    """A mount below another is its direct child: a runtime makes missing folders between them as root, closed to us."""
    for pod in pods(things):
        for container in pod.containers():
            paths = {Path(mount["mountPath"]) for mount in container.get("volumeMounts", ())}
            between = {path.parent for path in paths if paths.intersection(path.parents)} - paths
            assert not between, (pod.name, container["name"], between)


def test_every_reference_resolves(overlay: str, things: Things) -> None:
    """All referenced names are rendered by the overlay or created by docs/kubernetes.md."""
    assert unresolved(things) == []
    password = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].get("redisPassword")
    assert (password is None) == (overlay == "dev")


@pytest.mark.parametrize(
    ("upon", "component"),
    [
        *(("dev", component) for component in ("text", "train-workers", "vllm")),
        ("prod", "object-store"),
        *(("prod", component) for component in ("text", "train-workers", "vllm")),
        *(("gpu", component) for component in ("text", "text-gpu", "train-workers")),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_every_reference_of_a_component_resolves(upon: str, component: str, is_inside: bool, tmp_path: Path) -> None:
    """References resolve with the component inside an overlay, and on top of one in a namespace of another name."""
    namespace = "tailrace" if upon == "dev" else "staging"  # dev's settings name their namespace
    things = with_component(upon, component, tmp_path, is_inside=is_inside, namespace=namespace)

    assert unresolved(things) == []
    assert {container["image"].split(":")[0] for pod in pods(things) for container in pod.containers()} >= {"tailrace"}


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
    """The reference check detects each kind of unresolved reference."""
    things = render("prod")
    change(things)

    assert any(complaint in line for line in unresolved(things))


def on_claim(pod: Pod, container: str, path: Path) -> tuple[str, str] | None:
    """Return the claim that holds a container's path and the path within it, or None."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = [mount for mount in pod.container(container)["volumeMounts"] if path.is_relative_to(mount["mountPath"])]
    mount = max(mounts, key=lambda mount: len(mount["mountPath"]))
    if mount["name"] not in claims:
        return None
    within = Path(mount.get("subPath", ".")) / path.relative_to(mount["mountPath"])
    return claims[mount["name"]], str(within)


def shared_paths(settings: Settings) -> set[Path]:
    """Return the paths where a worker erases users."""
    files = erasing_files(settings, {})
    return {value for field in fields(files) if isinstance(value := getattr(files, field.name), Path)}


def test_a_worker_sees_every_store_of_a_receipt_where_the_pipeline_writes_it(things: Things) -> None:
    """Worker and pipeline mount these paths from the same claim, and gateways read the worker's items snapshot."""
    worker, train = pod_of(things, "tailrace-stream"), pod_of(things, "tailrace-train")
    settings = settings_of(things, worker.container("worker"))

    for path in shared_paths(settings):
        claim = on_claim(worker, "worker", path)
        assert claim is not None, path
        assert claim == on_claim(train, "pipeline", path), path
    for name, container in (("tailrace-gateways", "ray-worker"), ("tailrace-standby", "standby")):
        claim = on_claim(pod_of(things, name), container, settings.items_snapshot)
        assert claim is not None
        assert claim == on_claim(worker, "worker", settings.items_snapshot)


def test_compose_mounts_the_whole_state_where_users_are_erased_and_items_are_read() -> None:
    """The `state` volume holds all of these paths."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("worker", "pipeline", "prepare"):
        assert "state:/state" in services[name]["volumes"], name
    for name in ("serve", "standby"):
        assert any(volume.startswith("state:/state") for volume in services[name]["volumes"]), name
