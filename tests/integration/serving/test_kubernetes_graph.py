"""The application of the RayService's config, built by Ray Serve's own code."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from tests.support.manifests import OVERLAYS, ROOT, environment, pod_of, render, serve_config

BUILD = """
import json, sys
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from ray._common.utils import import_attr
from ray.serve._private.build_app import build_app
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ServeApplicationSchema

config = ServeApplicationSchema.model_validate_json(sys.stdin.read())
built = build_app(
    call_builder(import_attr(config.import_path), config.args), name=config.name, make_deployment_handle=lambda *_: None
)
infos = {
    part.name: DeploymentInfo(
        deployment_config=part._deployment_config, replica_config=part._replica_config,
        start_time_ms=0, deployer_job_id="0",
    )
    for part in built.deployments
}
found = {}
for name, info in override_deployment_info(infos, config).items():
    scaling, actor = info.deployment_config.autoscaling_config, info.replica_config.ray_actor_options
    found[name] = {"cpus": actor.get("num_cpus"), "gpus": actor.get("num_gpus", 0),
                   "env": actor["runtime_env"]["env_vars"],
                   "min": scaling.min_replicas, "max": scaling.max_replicas, "policy": scaling.policy.policy_function,
                   "target": scaling.target_ongoing_requests, "ongoing": info.deployment_config.max_ongoing_requests,
                   "queued": info.deployment_config.max_queued_requests}
print(json.dumps({"ingress": built.ingress_deployment_name, "deployments": found}))
"""


def built(overlay: str) -> dict[str, Any]:
    """Build the config's application as Ray Serve does, in an interpreter with the environment of a worker pod."""
    things = render(overlay)
    variables = environment(things, pod_of(things, "tailrace-gateways").containers()[0])
    (application,) = ServeDeploySchema.model_validate(serve_config(things)).applications
    rest = {key: value for key, value in os.environ.items() if not key.startswith(("TAILRACE_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD],
        input=application.model_dump_json(exclude_unset=True),
        env=rest | variables,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    graph: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return graph


@pytest.mark.parametrize(
    "overlay", ["gpu", *(pytest.param(name, marks=pytest.mark.grid) for name in OVERLAYS if name != "gpu")]
)
def test_the_graph_is_built_from_the_config(overlay: str) -> None:
    """The gateway is in front of the LLM, with the config's replicas, resources and policy."""
    graph = built(overlay)
    gateway, llm = graph["deployments"]["Gateway"], graph["deployments"]["llm"]

    assert graph["ingress"] == "Gateway"
    assert set(graph["deployments"]) == {"Gateway", "llm"}
    assert gateway["policy"] == "services.gateway.autoscale:by_queue_and_lateness"
    assert (gateway["cpus"], llm["gpus"]) == (1, 1 if overlay == "gpu" else 0)
    for deployment in (gateway, llm):
        assert deployment["min"] >= 1
        assert deployment["max"] > deployment["min"]
        assert deployment["target"] < deployment["ongoing"]
        assert deployment["queued"] > 0
        assert deployment["env"]["PROMETHEUS_MULTIPROC_DIR"] == "/var/lib/tailrace/run/metrics"
