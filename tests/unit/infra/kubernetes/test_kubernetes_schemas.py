"""Every manifest fits its schema."""

from pathlib import Path

import pytest

from tests.support.manifests import OVERLAYS, VERSIONS, complaints, pod_of, render, the, with_component


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    """All objects of an overlay fit their schemas; unknown fields are errors."""
    things = render(overlay)

    wrong = {f"{thing['kind']}/{thing['metadata']['name']}": complaints(thing, version) for thing in things}

    assert len(things) > 15
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("overlay", "component"), [("dev", "text"), ("gpu", "text-gpu"), ("prod", "canary"), ("prod", "train-workers")]
)
def test_a_component_leaves_every_object_valid(overlay: str, component: str, tmp_path: Path) -> None:
    """So does each component upon an overlay."""
    things = with_component(overlay, component, tmp_path)

    assert [found for thing in things if (found := complaints(thing, VERSIONS[-1]))] == []


def test_the_training_job_has_a_cluster_of_its_own_with_a_pod_a_rank(tmp_path: Path) -> None:
    """As many pods as `--workers`, under the same restrictions as all others, and nothing starts when the component is applied."""
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
