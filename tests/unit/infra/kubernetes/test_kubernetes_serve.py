"""The Serve config of the RayService, read by Ray Serve's own schema, also with the components upon it."""

from pathlib import Path

import pytest
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from services.app import GRPC_SERVICERS
from tests.support.manifests import (
    OVERLAYS,
    VERSIONS,
    complaints,
    pod_of,
    render,
    serve_config,
    settings_of,
    the,
    with_component,
)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_fit_into_the_pods(overlay: str) -> None:
    """Minimal and maximal replicas fit into the pods' CPUs and GPUs; gRPC registers the servicers of services.app on every node.

    Ray Serve opens doors where replicas are, so each minimal pod needs a replica, or it would never be ready.
    """
    groups = the(render(overlay), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    config = ServeDeploySchema.model_validate(serve_config(render(overlay)))
    deployments = {one.name: one for one in config.applications[0].deployments}
    for group, name in (("gateways", "Gateway"), ("llm", "llm")):
        (pods,) = [one["minReplicas"] for one in groups if one["groupName"] == group]
        assert deployments[name].autoscaling_config["min_replicas"] >= pods, group
    for bound in ("min", "max"):
        for resource in ("num_cpus", "num_gpus"):
            key = resource.replace("_", "-")
            given = sum(int(group["rayStartParams"].get(key, 0)) * group[f"{bound}Replicas"] for group in groups)
            wanted = sum(
                one.autoscaling_config[f"{bound}_replicas"] * (getattr(one.ray_actor_options, resource) or 0)
                for one in deployments.values()
            )

            assert wanted <= given, (bound, resource)
            assert bool(given) == (resource == "num_cpus" or overlay == "gpu")
    assert tuple(config.grpc_options.grpc_servicer_functions) == GRPC_SERVICERS
    assert all(callable(import_attr(name)) for name in GRPC_SERVICERS)
    assert config.proxy_location == "EveryNode"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_gateway_knows_how_many_there_may_be(overlay: str) -> None:
    """The setting by which gateways divide the keys' limits while Redis is away is the autoscaler's maximum."""
    things = render(overlay)
    (scaling,) = [
        one["autoscaling_config"]
        for one in serve_config(things)["applications"][0]["deployments"]
        if one["name"] == "Gateway"
    ]
    worker = pod_of(things, "tailrace-gateways").container("ray-worker")

    assert settings_of(things, worker).gateway_replicas == scaling["max_replicas"]


@pytest.mark.parametrize(("overlay", "component"), [("dev", "text"), ("prod", "text"), ("gpu", "text-gpu")])
def test_text_has_its_resources_and_its_checkpoint(overlay: str, component: str, tmp_path: Path) -> None:
    """One more deployment, last, with CPUs for its threads, which keeps it off the head, and a GPU where its device is one.

    Each pod that may run it mounts the settings' path read-only from the shared volume.
    """
    things = with_component(overlay, component, tmp_path)
    *others, text = serve_config(things)["applications"][0]["deployments"]
    settings = settings_of(things, pod_of(things, "tailrace-llm").container("ray-worker"))
    wanted = {"num_cpus": settings.text_threads} | ({"num_gpus": 1} if settings.llm_device == "cuda" else {})

    assert text == {"name": "text", "ray_actor_options": wanted}
    assert others == serve_config(render(overlay))["applications"][0]["deployments"]
    for name in ("tailrace-gateways", "tailrace-llm"):
        worker = pod_of(things, name).container("ray-worker")
        checkpoint = {"name": "shared", "mountPath": settings.text_path, "subPath": "text", "readOnly": True}
        assert checkpoint in worker["volumeMounts"], name


def test_the_canary_moves_traffic_in_steps(tmp_path: Path) -> None:
    """With the component the service is valid."""
    service = the(with_component("prod", "canary", tmp_path), "RayService")

    assert complaints(service, VERSIONS[-1]) == []
    assert service["spec"]["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
