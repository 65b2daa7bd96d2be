"""Text on Kubernetes: its components upon each overlay."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.support.manifests import (
    KUBERNETES,
    Thing,
    parse,
    pod_of,
    render,
    rendered_text,
    settings_of,
    the,
)

COMPONENTS = {"dev": "text", "prod": "text", "gpu": "text-gpu"}
every_overlay = pytest.mark.parametrize("overlay", COMPONENTS)


@pytest.fixture
def with_text(overlay: str, tmp_path: Path) -> list[Thing]:
    """The objects of an overlay with its text component."""
    names = [KUBERNETES / "overlays" / overlay, KUBERNETES / "components" / COMPONENTS[overlay]]
    resource, component = (os.path.relpath(name, tmp_path.resolve()) for name in names)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [resource], "components": [component]}))
    return parse(rendered_text(tmp_path.resolve()))


def serve_config(things: list[Thing]) -> dict[str, Any]:
    """Return the config as Ray Serve reads it."""
    config = yaml.safe_load(the(things, "RayService")["spec"]["serveConfigV2"])
    return ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True)


@every_overlay
def test_the_text_replica_has_its_resources(overlay: str, with_text: list[Thing]) -> None:
    """One more deployment, last, with CPUs for its threads, which keeps it off the head, and a GPU where its device is one."""
    *others, text = serve_config(with_text)["applications"][0]["deployments"]
    settings = settings_of(with_text, pod_of(with_text, "tailrace-llm").container("ray-worker"))
    wanted = {"num_cpus": settings.text_threads} | ({"num_gpus": 1} if settings.llm_device == "cuda" else {})

    assert text == {"name": "text", "ray_actor_options": wanted}
    assert others == serve_config(render(overlay))["applications"][0]["deployments"]


@every_overlay
def test_its_checkpoint_is_mounted_where_replicas_run(overlay: str, with_text: list[Thing]) -> None:
    """Each pod that may run the replica mounts the settings' path read-only from the shared volume."""
    for name in ("tailrace-gateways", "tailrace-llm"):
        worker = pod_of(with_text, name).container("ray-worker")
        path, mounts = settings_of(with_text, worker).text_path, worker["volumeMounts"]

        assert {"name": "shared", "mountPath": path, "subPath": "text", "readOnly": True} in mounts
