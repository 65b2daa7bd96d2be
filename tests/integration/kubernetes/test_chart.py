"""The Helm chart by Helm itself: the same objects as the overlays, values that reach their places, refusals that name the value."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.settings.settings import Settings
from tests.support.helm import helm
from tests.support.manifests import (
    KUBERNETES,
    complaints,
    environment,
    find,
    parse,
    pod_of,
    pods,
    render,
    serve_config,
    settings_of,
    the,
)

CHART = KUBERNETES / "chart"
OLDEST = "1.32"
NAMESPACE = "tailrace"
Things = list[dict[str, Any]]


def templated(*options: str | Path, namespace: str = NAMESPACE) -> Things:
    """Return the objects that an install would make."""
    done = helm("template", "tailrace", CHART, "--namespace", namespace, "--kube-version", OLDEST, *options)
    assert done.returncode == 0, done.stderr
    return [thing for thing in parse(done.stdout) if thing]


def refusal(*options: str) -> str:
    """Return why Helm refuses these values."""
    done = helm("template", "tailrace", CHART, "--kube-version", OLDEST, *options)
    assert done.returncode != 0
    return done.stderr


def by_name(things: Things) -> dict[tuple[str, str], dict[str, Any]]:
    """Return objects by kind and name, each of which there is once."""
    named = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    assert len(named) == len(things)
    return named


@pytest.mark.parametrize(("overlay", "options"), [("prod", ()), ("gpu", ("--values", CHART / "values-gpu.yaml"))])
def test_the_chart_is_the_overlay(overlay: str, options: tuple[str | Path, ...]) -> None:
    """Without values of one's own it makes the overlay's objects, each the same; the Namespace, which Helm needs before, on demand."""
    wanted = by_name(render(overlay))
    without_namespace = {key: thing for key, thing in wanted.items() if key != ("Namespace", NAMESPACE)}

    assert by_name(templated(*options)) == without_namespace
    assert by_name(templated(*options, "--set", "namespace.create=true")) == wanted


def test_lint_finds_nothing() -> None:
    """`helm lint --strict` passes, and says nothing but that there is no icon."""
    done = helm("lint", "--strict", CHART)
    said = [line for line in done.stdout.splitlines() if line.startswith("[")]

    assert done.returncode == 0, done.stdout
    assert said == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ("gateway.pods.min=many", "gateway.pods.min: Invalid type"),
        ("gateway.pods.mn=3", "gateway.pods: Additional property mn"),
        ("settings.TAILRACE_REDIS_HOST=a", "settings: Additional property TAILRACE_REDIS_HOST"),
        ("settings.TAILRACE_NO_SUCH=a", "settings: Additional property TAILRACE_NO_SUCH"),
        ("redis.port=70000", "redis.port: Must be less than or equal to 65535"),
        ("image.digest=latest", "image.digest: Does not match pattern"),
        ("surfaces.configMap=Shop", "surfaces.configMap: Does not match pattern"),
        ("rayRedis.address=host:6379", "rayRedis.address: Does not match pattern"),
        ("llm.resources.requests.cpu=lots", "llm.resources.requests.cpu: Does not match pattern"),
        ("gateway.pods.min=20", "gateway.pods.min: more than gateway.pods.max"),
        ("gateway.replicas.min=2", "gateway.replicas.min: less than gateway.pods.min"),
        ("stream.workers=40", "stream.workers: more than kafka.partitions"),
        ("ingress.enabled=true", "ingress.host: empty"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(wrong: str, field: str) -> None:
    """What the schema, or two values together, forbid ends the command with the field."""
    assert field in refusal("--set", wrong)


def test_values_reach_their_places(tmp_path: Path) -> None:
    """Sizes, addresses, images and names of Secrets that a shop gives are in the objects, which Kubernetes' schemas accept."""
    values = {
        "clusterDomain": "shop.example",
        "image": {
            "repository": "registry.example.com/tailrace",
            "digest": f"sha256:{'0' * 64}",
            "pullSecrets": ["pull"],
        },
        "nodeSelector": {"pool": "shop"},
        "tolerations": [{"key": "shop", "operator": "Exists"}],
        "doors": {"annotations": {"example.com/balancer": "internal"}},
        "ingress": {"enabled": True, "host": "shop.example", "grpcHost": "grpc.shop.example", "tlsSecret": "cert"},
        "redis": {"host": "redis.example", "port": 6390, "username": "", "tls": False, "secret": "redis-login"},
        "kafka": {"bootstrap": "kafka.example:9092", "username": "", "partitions": 32},
        "traces": {"endpoint": ""},
        "gateway": {"pods": {"min": 5, "max": 6}, "replicas": {"min": 7, "max": 24}},
        "stream": {"workers": 8, "resources": {"limits": {"memory": "3Gi"}}},
        "surfaces": {"configMap": "shop-surfaces"},
        "storage": {"className": "efs"},
        "monitoring": {"enabled": False},
        "dependencyPorts": [6390, 9092],
        "settings": {
            "TAILRACE_ALLOWED_HOSTS": "shop.example",
            "TAILRACE_MAX_RUNNING": 64,
            "TAILRACE_MAX_BODY_BYTES": 2_000_000,
            "TAILRACE_SURFACES_FILE": "/etc/tailrace/surfaces/surfaces.toml",
        },
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    things = templated("--values", file, namespace="shop")
    group = the(things, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    gateway = next(one for one in serve_config(things)["applications"][0]["deployments"] if one["name"] == "Gateway")
    worker = pod_of(things, "tailrace-stream").container("worker")
    settings = settings_of(things, worker)
    hosts = {one["metadata"]["name"]: one["spec"]["rules"][0]["host"] for one in find(things, "Ingress")}

    assert {key: wrong for key, thing in by_name(things).items() if (wrong := complaints(thing, OLDEST))} == {}
    assert {thing["metadata"]["namespace"] for thing in things} == {"shop"}
    assert find(things, "PodMonitor") == find(things, "PrometheusRule") == []
    for pod in pods(things):
        assert pod.spec["imagePullSecrets"] == [{"name": "pull"}], pod.name
        assert pod.spec["nodeSelector"] == {"pool": "shop"}, pod.name
        assert pod.spec["tolerations"] == values["tolerations"], pod.name
        assert {one["image"] for one in pod.containers()} == {f"registry.example.com/tailrace@sha256:{'0' * 64}"}
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (5, 5, 6)
    assert the(things, "PodDisruptionBudget", "tailrace-gateway")["spec"]["minAvailable"] == 4
    assert gateway["autoscaling_config"].items() >= {"min_replicas": 7, "max_replicas": 24}.items()
    assert (settings.redis_host, settings.redis_port, settings.kafka_bootstrap) == (
        "redis.example",
        6390,
        "kafka.example:9092",
    )
    for left_out in ("redis_username", "redis_tls_ca_file", "kafka_username", "kafka_password_file", "otlp_endpoint"):
        assert getattr(settings, left_out) == getattr(Settings.model_construct(), left_out), left_out
    assert str(settings.redis_password_file) == "/etc/tailrace/redis/password"
    assert (settings.gateway_replicas, settings.topic_partitions, settings.num_workers) == (24, 32, 8)
    assert (settings.max_running, settings.max_body_bytes) == (64, 2_000_000)
    assert worker["resources"]["limits"] == {"memory": "3Gi"}
    assert str(settings.surfaces_file) == "/etc/tailrace/surfaces/surfaces.toml"
    for pod in ("standby", "gateways", "llm"):
        volumes = json.dumps(pod_of(things, f"tailrace-{pod}").spec["volumes"])
        assert "redis-login" in volumes
        assert "shop-surfaces" in volumes
    assert the(things, "PersistentVolumeClaim")["spec"]["storageClassName"] == "efs"
    ports = the(things, "NetworkPolicy", "tailrace-dependencies")["spec"]["egress"][0]["ports"]
    assert [one["port"] for one in ports] == [6390, 9092]
    assert hosts == {"tailrace-rest": "shop.example", "tailrace-grpc": "grpc.shop.example"}
    edge = pod_of(things, "tailrace-edge").container("edge")
    assert edge["args"][1] == "tailrace-ray.shop.svc.shop.example"
    head = pod_of(things, "tailrace-head").container("ray-head")
    assert "tailrace-standby.shop.svc.shop.example" in environment(things, head)["RAY_INGRESS_OPTIONS"]


def test_a_changed_setting_changes_the_pods() -> None:
    """The ConfigMap's name follows its content, as Kustomize's does, so that Ray builds a new cluster and every pod is replaced."""
    before, after = (
        {
            source["configMapRef"]["name"]
            for pod in pods(things)
            for one in pod.containers()
            for source in one.get("envFrom", ())
        }
        for things in (templated(), templated("--set", "settings.TAILRACE_MAX_RUNNING=64"))
    )

    assert len(before) == len(after) == 2
    assert len(before & after) == 1


def test_the_notes_name_what_to_do_next(tmp_path: Path) -> None:
    """They name this install's namespace, Secrets and host, and each object that their commands name exists.

    Helm renders notes only where there is a cluster, so a template of a copy of the chart includes them here.
    """
    copy = shutil.copytree(CHART, tmp_path / "chart")
    notes = copy / "templates/NOTES.txt"
    body = f'{{{{- define "notes" }}}}\n{notes.read_text()}{{{{- end }}}}\nkind: Notes\ntext: {{{{ include "notes" . | quote }}}}\n'
    notes.with_name("notes.yaml").write_text(body)
    options = ("--namespace", "shop", "--kube-version", OLDEST, "--set", "apiKeys.secret=our-keys")
    done = helm("template", "tailrace", copy, *options, "--set", "ingress.enabled=true,ingress.host=shop.example")
    assert done.returncode == 0, done.stderr
    (text,) = [thing["text"] for thing in parse(done.stdout) if thing and thing["kind"] == "Notes"]
    named = set(re.findall(r"\b(?:cronjob|rayservice|service)/[\w-]+", text))

    assert "-n shop" in text
    assert "secret our-keys tailrace-tls" in text
    assert "https://shop.example" in text
    assert named == {"cronjob/tailrace-train", "rayservice/tailrace", "service/tailrace-doors"}
    assert named <= {f"{kind}/{name}".lower() for kind, name in by_name(templated())}
