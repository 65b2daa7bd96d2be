"""Text on Kubernetes: what its components add to an overlay. `pytest tests/unit/infra/test_kubernetes_text.py`."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from services.settings.settings import Settings
from tests.support.manifests import (
    KUBERNETES,
    VERSIONS,
    Thing,
    complaints,
    environment,
    parse,
    pod_of,
    render,
    rendered_text,
    the,
)

COMPONENTS = {"dev": "text", "prod": "text", "gpu": "text-gpu"}
every_overlay = pytest.mark.parametrize("overlay", COMPONENTS)


@pytest.fixture
def with_text(overlay: str, tmp_path: Path) -> list[Thing]:
    """An overlay's objects with the component that is for it, from an overlay upon it."""
    names = [KUBERNETES / "overlays" / overlay, KUBERNETES / "components" / COMPONENTS[overlay]]
    resource, component = (os.path.relpath(name, tmp_path.resolve()) for name in names)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [resource], "components": [component]}))
    return parse(rendered_text(tmp_path.resolve()))


def serve_config(things: list[Thing]) -> dict[str, Any]:
    """What Ray Serve makes of the config."""
    told = yaml.safe_load(the(things, "RayService")["spec"]["serveConfigV2"])
    return ServeDeploySchema.model_validate(told).model_dump(exclude_unset=True)


@every_overlay
def test_it_is_valid_and_everything_else_is_as_it_was(overlay: str, with_text: list[Thing]) -> None:
    """Objects fit the schemas, and none comes or goes."""
    before = [(thing["kind"], thing["metadata"]["name"].rpartition("-")[0]) for thing in render(overlay)]

    assert [complaints(the(with_text, "RayService"), version) for version in VERSIONS] == [[], []]
    assert [(thing["kind"], thing["metadata"]["name"].rpartition("-")[0]) for thing in with_text] == before


@every_overlay
def test_the_text_s_replica_is_placed_where_it_can_run(overlay: str, with_text: list[Thing]) -> None:
    """One more deployment, last, with CPUs for its threads, so that it is never put on the head, and a GPU where its device is one."""
    *others, text = serve_config(with_text)["applications"][0]["deployments"]
    settings = settings_of(with_text, "tailrace-llm")
    wanted = {"num_cpus": settings.text_threads} | ({"num_gpus": 1} if settings.llm_device == "cuda" else {})

    assert text == {"name": "text", "ray_actor_options": wanted}
    assert others == serve_config(render(overlay))["applications"][0]["deployments"]


@every_overlay
def test_its_checkpoint_is_mounted_where_replicas_run(overlay: str, with_text: list[Thing]) -> None:
    """The path in the settings is a folder of the shared volume, in each pod that may run the replica, read-only."""
    for name in ("tailrace-gateways", "tailrace-llm"):
        path = settings_of(with_text, name).text_path
        mounts = pod_of(with_text, name).container("ray-worker")["volumeMounts"]

        assert {"name": "shared", "mountPath": path, "subPath": "text", "readOnly": True} in mounts


def settings_of(things: list[Thing], pod: str) -> Settings:
    """What a replica in that pod loads."""
    told = environment(things, pod_of(things, pod).container("ray-worker"))
    return Settings.model_validate(
        {key.removeprefix("TAILRACE_").lower(): value for key, value in told.items() if key.startswith("TAILRACE_")}
    )
