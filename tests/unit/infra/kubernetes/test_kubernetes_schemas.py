"""Every manifest matches its schema."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import VERSIONS, complaints, pod_of, the, with_component


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(things: list[dict[str, Any]], version: str) -> None:
    """All objects of an overlay match their schemas; unknown fields are errors."""
    assert len(things) > 15
    assert [complaint for thing in things for complaint in complaints(thing, version)] == []


@pytest.mark.parametrize(("upon", "component"), [("dev", "text"), ("gpu", "text-gpu"), ("prod", "train-workers")])
def test_a_component_leaves_every_object_valid(upon: str, component: str, tmp_path: Path) -> None:
    """All objects remain valid with a component added to an overlay."""
    things = with_component(upon, component, tmp_path)

    assert [complaint for thing in things for complaint in complaints(thing, VERSIONS[-1])] == []


def test_the_training_job_has_a_cluster_of_its_own_with_a_pod_a_rank(tmp_path: Path) -> None:
    """The RayJob has `--workers` pods with the usual restrictions, and is suspended when the component is applied."""
    things = with_component("prod", "train-workers", tmp_path)
    job = the(things, "RayJob")["spec"]
    (ranks,) = job["rayClusterSpec"]["workerGroupSpecs"]
    words = job["entrypoint"].split()

    assert words[:2] == ["tailrace", "pipeline"]
    assert int(words[words.index("--workers") + 1]) == ranks["replicas"] == ranks["maxReplicas"]
    assert words[words.index("--ray") + 1] == "auto"
    assert job["suspend"] is True
    for pod in (pod_of(things, f"tailrace-train-workers-{name}") for name in ("head", "ranks")):
        (container,) = pod.containers()
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
