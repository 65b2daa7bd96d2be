"""The Serve config of the RayService, read by Ray Serve's own schema, also with the components upon it."""

import pytest
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from services.app import GRPC_SERVICERS
from tests.support.manifests import (
    OVERLAYS,
    pod_of,
    render,
    serve_config,
    settings_of,
    the,
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
    """The setting by which gateways divide the keys' limits while Redis is unavailable is the autoscaler's maximum."""
    things = render(overlay)
    (scaling,) = [
        one["autoscaling_config"]
        for one in serve_config(things)["applications"][0]["deployments"]
        if one["name"] == "Gateway"
    ]
    worker = pod_of(things, "tailrace-gateways").container("ray-worker")

    assert settings_of(things, worker).gateway_replicas == scaling["max_replicas"]
