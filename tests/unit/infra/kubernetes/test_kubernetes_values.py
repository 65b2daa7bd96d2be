"""The manifests' values against the code: settings, ports, commands, metrics, Ray Serve's config."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray.serve._private.constants as serve_constants
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from infra.local.servers.node import node_environment
from infra.local.servers.ray_home import ray_environment
from services.app import GRPC_SERVICERS
from services.settings.settings import Settings, load_settings
from tests.support.manifests import (
    ROOT,
    environment,
    parse,
    pod_of,
    pods,
    render,
    rendered_text,
    serve_config,
    settings_of,
    the,
)

Things = list[dict[str, Any]]

OURS = {f"tailrace-{name}" for name in ("head", "gateways", "llm", "edge", "standby", "stream", "train", "precompute")}
SET_FOR_THIS_MACHINE = re.compile(
    r"RAY_AUTH|RAY_ENABLE|RAY_INGRESS|_LOC$|_PATH$|_SERVER_STATE_|_PORT$|_CONCURRENCY$", re.IGNORECASE
)


def test_images_can_be_given_by_digest(overlay: str, tmp_path: Path) -> None:
    """With `digest` instead of `newTag`, each of our containers has its image by digest."""
    shutil.copytree(ROOT / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("*.py"))
    for file in (tmp_path / "infra/kubernetes").rglob("kustomization.yaml"):
        file.write_text(re.sub(r"newTag: [\w.-]+", f"digest: sha256:{'0' * 64}", file.read_text()))
    things = parse(rendered_text(tmp_path / "infra/kubernetes/overlays" / overlay))
    images = {container["image"] for pod in pods(things) if pod.name in OURS for container in pod.containers()}

    assert images == {f"tailrace@sha256:{'0' * 64}"}


def test_every_container_loads_its_settings(things: Things, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process accepts its environment, every variable is a setting, and its module exists."""
    for key in [key for key in os.environ if key.startswith("TAILRACE_")]:
        monkeypatch.delenv(key)
    for pod in [pod for pod in pods(things) if pod.name in OURS]:
        for container in [
            container for container in pod.containers() if container["name"] != "log"
        ]:  # it copies a file
            with monkeypatch.context() as context:
                for key, value in environment(things, container).items():
                    context.setenv(key, value)
                assert str(load_settings().state_dir) == "/var/lib/tailrace", (pod.name, container["name"])
            command = container.get("command", [])
            assert command[:2] != ["python", "-m"] or importlib.util.find_spec(command[2]), command


@pytest.mark.parametrize("name", ["gateways", "llm", "standby"])
def test_surfaces_and_experiments_are_files_of_a_config_map_that_may_be_missing(things: Things, name: str) -> None:
    """Every pod that may run a gateway mounts the files at the paths documented for the settings."""
    pod = pod_of(things, f"tailrace-{name}")
    (source,) = [
        (volume["name"], projection["configMap"])
        for volume in pod.spec["volumes"]
        for projection in volume.get("projected", {}).get("sources", ())
        if "configMap" in projection
    ]
    (mount,) = [mount for mount in pod.containers()[0]["volumeMounts"] if mount["name"] == source[0]]
    files = {item["key"]: f"{mount['mountPath']}/{item['path']}" for item in source[1]["items"]}
    page = (ROOT / "docs/kubernetes.md").read_text()

    assert (source[1]["name"], source[1]["optional"], mount["readOnly"]) == ("tailrace-surfaces", True, True)
    assert files.keys() == {"surfaces.toml", "experiments.toml"}
    for key, path in files.items():
        assert f"TAILRACE_{key.removesuffix('.toml').upper()}_FILE={path}" in page


def test_ports_are_those_of_the_settings(things: Things) -> None:
    """Containers, Services and Ray Serve's config use the settings' ports, and the edge calls existing Services."""
    serve, edge = serve_config(things), pod_of(things, "tailrace-edge").container("edge")
    settings = settings_of(things, edge)
    inner = settings.inner_http_port, settings.inner_grpc_port
    expected = {
        "edge": {"http": settings.http_port, "grpc": settings.grpc_port},
        "gateways": {"serve": inner[0], "grpc": inner[1]},
        "standby": {"http": settings.standby_http_port, "grpc": settings.standby_grpc_port},
    }

    for name, service in (("edge", "doors"), ("gateways", "ray"), ("standby", "standby")):
        containers = pod_of(things, f"tailrace-{name}").containers()
        given = {port["name"]: port["containerPort"] for container in containers for port in container.get("ports", ())}
        ports = the(things, "Service", f"tailrace-{service}")["spec"]["ports"]
        assert {**expected[name], "node-metrics": settings.metrics_port}.items() <= given.items()
        assert {port["targetPort"]: port["port"] for port in ports} == expected[name]
    assert edge["args"][1::2] == [f"tailrace-{name}.$(POD_NAMESPACE).svc.cluster.local" for name in ("ray", "standby")]
    assert serve["http_options"] == {"host": settings.inner_host, "port": inner[0]}
    assert serve["grpc_options"]["port"] == inner[1]


def test_ray_is_set_up_as_in_the_embedded_stack(tmp_path: Path) -> None:
    """Except for single-machine variables, Ray has the embedded stack's variables, and Ray Serve reads each of them."""
    things, defaults = render("prod"), Settings.model_construct()
    given = environment(things, pod_of(things, "tailrace-head").containers()[0])
    embedded = ray_environment(tmp_path, defaults).items()
    wanted = {key: value for key, value in embedded if not SET_FOR_THIS_MACHINE.search(key)}
    ingress = Path(given["RAY_SERVE_HAPROXY_BINARY_PATH"]).relative_to("/app")  # the repository's folder in the image
    source = Path(str(serve_constants.__file__)).read_text()

    assert wanted.items() <= given.items()
    assert wanted.items() <= node_environment(defaults, "standby", tmp_path / "token").items()
    assert os.access(ROOT / ingress, os.X_OK)
    assert given["RAY_INGRESS_OPTIONS"] == "--standby tailrace-standby.tailrace.svc.cluster.local 18001 19001"
    assert [key for key in given if key.startswith("RAY_SERVE_") and f'"{key}"' not in source] == []


def test_replicas_fit_into_the_pods(overlay: str, things: Things) -> None:
    """Replicas fit the pods' resources, each pod gets a replica, and gateways know the maximum replica count."""
    groups = the(things, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    config = ServeDeploySchema.model_validate(serve_config(things))
    deployments = {deployment.name: deployment for deployment in config.applications[0].deployments}
    for group, name in (("gateways", "Gateway"), ("llm", "llm")):
        (num_pods,) = [worker_group["minReplicas"] for worker_group in groups if worker_group["groupName"] == group]
        assert deployments[name].autoscaling_config["min_replicas"] >= num_pods, group
    for group in groups:
        requested = group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        assert group["rayStartParams"]["num-cpus"] == (requested if overlay != "dev" else "4"), group["groupName"]
    for bound in ("min", "max"):
        for resource in ("num_cpus", "num_gpus"):
            key = resource.replace("_", "-")
            given = sum(int(group["rayStartParams"].get(key, 0)) * group[f"{bound}Replicas"] for group in groups)
            wanted = sum(
                deployment.autoscaling_config[f"{bound}_replicas"]
                * (getattr(deployment.ray_actor_options, resource) or 0)
                for deployment in deployments.values()
            )
            assert wanted <= given, (bound, resource)
            assert bool(given) == (resource == "num_cpus" or overlay == "gpu")
    gateway = settings_of(things, pod_of(things, "tailrace-gateways").container("ray-worker"))
    assert gateway.gateway_replicas == deployments["Gateway"].autoscaling_config["max_replicas"]
    assert tuple(config.grpc_options.grpc_servicer_functions) == GRPC_SERVICERS
    assert all(callable(import_attr(name)) for name in GRPC_SERVICERS)
    assert config.proxy_location == "EveryNode"


@pytest.mark.parametrize(("age_s", "code"), [(0, 0), (120, 1)])
def test_the_heartbeat_probe_finds_a_stalled_worker(age_s: int, code: int, tmp_path: Path) -> None:
    """The probe's shell command succeeds for a fresh heartbeat and fails for an old heartbeat."""
    worker = pod_of(render("prod"), "tailrace-stream").container("worker")
    shell, flag, line = worker["livenessProbe"]["exec"]["command"]
    beat = tmp_path / "worker-0.beat"
    beat.touch()
    os.utime(beat, (beat.stat().st_atime, beat.stat().st_mtime - age_s))

    command = [shell, flag, line.replace("/var/lib/tailrace/run", str(tmp_path))]
    done = subprocess.run(command, env={**os.environ, "TAILRACE_WORKER_INDEX": "0"}, check=False)

    assert done.returncode == code
