"""The Serve config of the RayService, read by Ray Serve's own schema."""

import pytest
import yaml
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from services.app import GRPC_SERVICERS
from tests.support.manifests import OVERLAYS, render, the


def serve_config(overlay: str) -> ServeDeploySchema:
    """Return the config, checked by Ray Serve's own schema."""
    return ServeDeploySchema.model_validate(yaml.safe_load(the(render(overlay), "RayService")["spec"]["serveConfigV2"]))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_fit_into_the_pods(overlay: str) -> None:
    """Minimal and maximal replicas fit into the pods' CPUs and GPUs.

    Ray Serve opens doors where replicas are, so each minimal pod needs a replica, or it would never be ready.
    """
    groups = the(render(overlay), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    deployments = {one.name: one for one in serve_config(overlay).applications[0].deployments}
    for group, name in (("gateways", "Gateway"), ("llm", "llm")):
        (pods,) = [one["minReplicas"] for one in groups if one["groupName"] == group]
        scaling = deployments[name].autoscaling_config
        assert isinstance(scaling, dict)
        assert scaling["min_replicas"] >= pods, group
    for bound in ("min", "max"):
        pods_of = {group["groupName"]: group[f"{bound}Replicas"] for group in groups}
        cpus = sum(int(group["rayStartParams"]["num-cpus"]) * pods_of[group["groupName"]] for group in groups)
        gpus = sum(int(group["rayStartParams"].get("num-gpus", 0)) * pods_of[group["groupName"]] for group in groups)
        wanted_cpus = wanted_gpus = 0.0
        for one in deployments.values():
            replicas = one.autoscaling_config[f"{bound}_replicas"]
            wanted_cpus += replicas * (one.ray_actor_options.num_cpus or 0)
            wanted_gpus += replicas * (one.ray_actor_options.num_gpus or 0)

        assert wanted_cpus <= cpus
        assert wanted_gpus <= gpus
        assert bool(gpus) == (overlay == "gpu")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_doors_are_those_of_the_app(overlay: str) -> None:
    """gRPC registers the servicers of services.app, each importable, on every node that has a replica."""
    config = serve_config(overlay)

    assert tuple(config.grpc_options.grpc_servicer_functions) == GRPC_SERVICERS
    assert all(callable(import_attr(name)) for name in GRPC_SERVICERS)
    assert config.proxy_location == "EveryNode"
