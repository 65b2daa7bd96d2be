"""The manifests' values against the code: settings, ports, commands, metrics."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray.serve._private.constants as serve_constants

from infra.local.servers.node import node_environment
from infra.local.servers.ray_home import ray_environment
from services.settings.settings import Settings, load_settings
from tests.support.manifests import (
    OVERLAYS,
    ROOT,
    Pod,
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

PREFIX = "TAILRACE_"
RAYS = {"tailrace-head", "tailrace-gateways", "tailrace-llm"}
OURS = RAYS | {"tailrace-edge", "tailrace-standby", "tailrace-stream", "tailrace-train", "tailrace-precompute"}
SET_FOR_THIS_MACHINE = re.compile(r"RAY_AUTH|RAY_ENABLE|RAY_INGRESS|_LOC$|_PATH$|_SERVER_STATE_|_PORT$")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_can_be_given_by_digest(overlay: str, tmp_path: Path) -> None:
    """With `digest` in the place of `newTag`, every container of ours has its image by digest, and none by tag."""
    shutil.copytree(ROOT / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("*.py"))
    for file in (tmp_path / "infra/kubernetes").rglob("kustomization.yaml"):
        file.write_text(re.sub(r"newTag: [\w.-]+", f"digest: sha256:{'0' * 64}", file.read_text()))
    things = parse(rendered_text(tmp_path / "infra/kubernetes/overlays" / overlay))
    images = {one["image"] for pod in pods(things) if pod.name in OURS for one in pod.containers()}

    assert images == {f"tailrace@sha256:{'0' * 64}"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_loads_its_settings(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process accepts its environment, of which every variable is a setting, and its module exists."""
    things = render(overlay)
    ours = [
        (pod.name, container)
        for pod in pods(things)
        for container in pod.containers()
        if pod.name in OURS and container["name"] != "log"  # which copies a file
    ]
    for name, container in ours:
        with monkeypatch.context() as context:
            for key in [key for key in os.environ if key.startswith(PREFIX)]:
                context.delenv(key)
            for key, value in environment(things, container).items():
                context.setenv(key, value)
            assert str(load_settings().state_dir) == "/var/lib/tailrace", (name, container["name"])
    assert {name for name, _ in ours} == OURS
    commands = [container.get("command", []) for _, container in ours]
    modules = {command[2] for command in commands if command[:2] == ["python", "-m"]}
    assert modules == {"services.stream", "infra.kafka.topics", "infra.local.servers.metrics", "infra.docker"}
    assert all(importlib.util.find_spec(name) for name in modules)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_files_of_settings_are_mounted(overlay: str) -> None:
    """Each container mounts the credentials that its settings name."""
    things = render(overlay)
    for pod in [pod for pod in pods(things) if pod.name in OURS - {"tailrace-head"}]:
        for container in pod.containers():
            variables = environment(things, container)
            wanted = {f"{file}" for key in USES[container["name"]] if (file := variables.get(key))}
            if container["name"] == "edge":
                wanted = {f"{folder}/{name}" for folder in wanted for name in ("tls.crt", "tls.key")}

            assert wanted <= files_in(pod, container), (pod.name, container["name"])
            assert bool(wanted) == (overlay != "dev" and bool(USES[container["name"]])), container["name"]


STORES = {
    f"{PREFIX}{one}" for one in ("REDIS_PASSWORD_FILE", "REDIS_TLS_CA_FILE", "KAFKA_PASSWORD_FILE", "KAFKA_TLS_CA_FILE")
}
USES: dict[str, set[str]] = {
    "ray-worker": STORES | {f"{PREFIX}API_KEYS_FILE"},
    "standby": STORES | {f"{PREFIX}API_KEYS_FILE"},
    "worker": STORES,
    "pipeline": STORES,
    "topics": {one for one in STORES if "KAFKA" in one},
    "edge": {f"{PREFIX}TLS_DIR"},
    "node-metrics": set(),
    "log": set(),
}
"""The settings that name files and that each container uses."""


def files_in(pod: Pod, container: dict[str, Any]) -> set[str]:
    """Return the paths of the secrets that a container mounts."""
    found = set()
    for mount in container["volumeMounts"]:
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        sources = [source["secret"] for source in volume.get("projected", {"sources": ()})["sources"]]
        found |= {f"{mount['mountPath']}/{item['path']}" for secret in sources for item in secret["items"]}
        if "secret" in volume:  # without items, of type kubernetes.io/tls
            names = [item["path"] for item in volume["secret"].get("items", ())] or ["tls.crt", "tls.key"]
            found |= {f"{mount['mountPath']}/{name}" for name in names}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_settings(overlay: str) -> None:
    """Containers, Services and Ray Serve's config have the settings' ports, and the edge calls Services that exist."""
    things = render(overlay)
    serve = serve_config(things)
    edge = pod_of(things, "tailrace-edge").container("edge")
    settings = settings_of(things, edge)
    expected = {
        "tailrace-edge": {"http": settings.http_port, "grpc": settings.grpc_port},
        "tailrace-gateways": {"serve": settings.inner_http_port, "grpc": settings.inner_grpc_port},
        "tailrace-standby": {"http": settings.standby_http_port, "grpc": settings.standby_grpc_port},
    }
    services = {
        "tailrace-doors": "tailrace-edge",
        "tailrace-ray": "tailrace-gateways",
        "tailrace-standby": "tailrace-standby",
    }

    for name, ports in expected.items():
        containers = pod_of(things, name).containers()
        given = {port["name"]: port["containerPort"] for one in containers for port in one.get("ports", ())}
        assert ports.items() <= given.items()
        assert given["node-metrics"] == settings.metrics_port
    for name, pod in services.items():
        ports = the(things, "Service", name)["spec"]["ports"]
        assert {port["targetPort"]: port["port"] for port in ports} == expected[pod]
    assert edge["args"][1::2] == [f"{name}.tailrace.svc.cluster.local" for name in ("tailrace-ray", "tailrace-standby")]
    assert serve["http_options"] == {"host": settings.inner_host, "port": settings.inner_http_port}
    assert serve["grpc_options"]["port"] == settings.inner_grpc_port


def test_ray_is_set_up_as_in_the_embedded_stack(tmp_path: Path) -> None:
    """Ray's variables of the embedded stack are set here and on machines too, except those of one machine, and Ray Serve reads each name."""
    things = render("prod")
    told = environment(things, pod_of(things, "tailrace-head").containers()[0])
    here = {
        key: value
        for key, value in ray_environment(tmp_path, Settings.model_construct()).items()
        if not SET_FOR_THIS_MACHINE.search(key)
    }

    machine = node_environment(Settings.model_construct(), "standby", tmp_path / "token")
    assert here.items() <= told.items()
    assert here.items() <= machine.items()
    ingress = ROOT / Path(told["RAY_SERVE_HAPROXY_BINARY_PATH"]).relative_to(
        "/app"
    )  # where the image has the repository
    assert os.access(ingress, os.X_OK)
    assert told["RAY_INGRESS_OPTIONS"] == "--standby tailrace-standby.tailrace.svc.cluster.local 18001 19001"
    source = Path(str(serve_constants.__file__)).read_text()
    assert [key for key in told if key.startswith("RAY_SERVE_") and f'"{key}"' not in source] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_partition_has_one_worker(overlay: str) -> None:
    """As many stream workers as their settings say, each with its ordinal as index, and no more than partitions."""
    things = render(overlay)
    workers = pod_of(things, "tailrace-stream")
    container = workers.container("worker")
    variables = environment(things, container)
    (index,) = [one for one in container["env"] if one["name"] == "TAILRACE_WORKER_INDEX"]

    assert the(things, "StatefulSet", "tailrace-stream")["spec"]["replicas"] == int(variables["TAILRACE_NUM_WORKERS"])
    assert int(variables["TAILRACE_NUM_WORKERS"]) <= int(variables["TAILRACE_TOPIC_PARTITIONS"])
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_metrics_are_written_where_they_are_read(overlay: str) -> None:
    """Processes write their metrics into the volume that the metrics container of their pod reads.

    It drops the gauges of pids that /proc lacks, so it must see the other containers' processes.
    """
    things = render(overlay)
    serve = serve_config(things)
    folder = str(Settings(state_dir=Path("/var/lib/tailrace")).metrics_dir)
    for pod in [pod for pod in pods(things) if pod.name in {"tailrace-gateways", "tailrace-llm", "tailrace-stream"}]:
        writer, endpoint = pod.containers()[0], pod.container("node-metrics")
        told = environment(things, writer) | serve["applications"][0]["runtime_env"]["env_vars"]
        mounts = [{m["mountPath"]: m["name"] for m in one["volumeMounts"]}[folder] for one in (writer, endpoint)]

        assert told["PROMETHEUS_MULTIPROC_DIR"] == folder
        assert mounts == ["metrics", "metrics"]
        assert pod.spec["shareProcessNamespace"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_log_lines_are_written_where_they_are_read(overlay: str) -> None:
    """What Ray runs writes its lines to a file of its pod that a container copies to its output; the other pods write to their own."""
    things = render(overlay)
    for pod in pods(things):
        for container in pod.containers():
            log_file = environment(things, container).get("TAILRACE_LOG_FILE")
            assert bool(log_file) == (container["name"] in {"ray-head", "ray-worker"}), (pod.name, container["name"])
            if container["name"] == "ray-worker":
                reader = pod.container("log")
                mounts = [
                    {m["name"]: m["mountPath"] for m in one["volumeMounts"]}["state"] for one in (container, reader)
                ]
                assert reader["command"][0] == "tail"
                assert reader["command"][-1] == log_file
                assert mounts == ["/var/lib/tailrace"] * 2


@pytest.mark.parametrize(("age_s", "code"), [(0, 0), (120, 1)])
def test_the_heartbeat_probe_finds_a_stalled_worker(age_s: int, code: int, tmp_path: Path) -> None:
    """The probe's shell line succeeds for a fresh heartbeat and fails for an old one."""
    stream = pod_of(render("prod"), "tailrace-stream")
    shell, flag, line = stream.container("worker")["livenessProbe"]["exec"]["command"]
    beat = tmp_path / "worker-0.beat"
    beat.touch()
    os.utime(beat, (beat.stat().st_atime, beat.stat().st_mtime - age_s))

    done = subprocess.run(
        [shell, flag, line.replace("/var/lib/tailrace/run", str(tmp_path))],
        env={**os.environ, "TAILRACE_WORKER_INDEX": "0"},
        check=False,
    )

    assert done.returncode == code
