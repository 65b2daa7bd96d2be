"""The Helm chart, rendered by Helm: the overlays' objects, values that take effect, and refusals by name."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.settings.settings import Settings
from tests.support.helm import helm
from tests.support.manifest_references import unresolved
from tests.support.manifests import (
    KUBERNETES,
    ROOT,
    Pod,
    complaints,
    environment,
    find,
    matches,
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
    """Return Helm's reason for refusing these values."""
    done = helm("template", "tailrace", CHART, "--kube-version", OLDEST, *options)
    assert done.returncode != 0
    return done.stderr


def by_name(things: Things) -> dict[tuple[str, str], dict[str, Any]]:
    """Return objects by kind and name; no two objects share both."""
    named = {(thing["kind"], thing["metadata"]["name"]): thing for thing in things}
    assert len(named) == len(things)
    return named


@pytest.mark.parametrize(("overlay", "options"), [("prod", ()), ("gpu", ("--values", CHART / "values-gpu.yaml"))])
def test_the_chart_is_the_overlay(overlay: str, options: tuple[str | Path, ...]) -> None:
    """With default values the chart renders exactly the overlay's objects; the Namespace is optional."""
    wanted = by_name(render(overlay))
    without_namespace = {key: thing for key, thing in wanted.items() if key != ("Namespace", NAMESPACE)}

    assert by_name(templated(*options, "--set", "train.first=false")) == without_namespace
    assert by_name(templated(*options, "--set", "train.first=false,namespace.create=true")) == wanted


@pytest.mark.parametrize(
    ("values", "cpus", "drain_s"),
    [
        ("llm.resources.requests.cpu=8", ("4", "8"), 15),
        ("gateway.resources.requests.cpu=6500m", ("6", "4"), 15),
        ("settings.TAILRACE_TEXT_PATH=/text", ("4", "4"), 60),
        ("settings.TAILRACE_TEXT_URL=http://text:80/v1,settings.TAILRACE_TEXT_DEADLINE_MS=90500", ("4", "4"), 91),
        ("settings.TAILRACE_TEXT_DEADLINE_MS=90500", ("4", "4"), 15),
    ],
)
def test_pods_of_ray_follow_their_resources_and_deadlines(values: str, cpus: tuple[str, str], drain_s: int) -> None:
    """Ray's CPUs are the whole CPUs requested, at least 4, and a pod that ends answers as long as a text may take."""
    ray = the(templated("--set", values), "RayService")
    groups = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]

    assert tuple(group["rayStartParams"]["num-cpus"] for group in groups) == cpus
    for group in groups:
        pod = group["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert command == f"sleep {drain_s}; ray stop --grace-period 20"
        assert pod["terminationGracePeriodSeconds"] == drain_s + 45


def test_lint_finds_nothing() -> None:
    """`helm lint --strict` passes with no remark except the missing icon."""
    done = helm("lint", "--strict", CHART)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]

    assert done.returncode == 0, done.stdout
    assert lines == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ("gateway.pods.min=many", "gateway.pods.min: Invalid type"),
        ("gateway.pods.mn=3", "gateway.pods: Additional property mn"),
        ("settings.TAILRACE_REDIS_HOST=a", "settings: Additional property TAILRACE_REDIS_HOST"),
        ("llm.resources.requests.cpu=lots", "llm.resources.requests.cpu: Does not match pattern"),
        ("gateway.pods.min=20", "gateway.pods.min: more than gateway.pods.max"),
        ("stream.workers=40", "stream.workers: more than kafka.partitions"),
        ("ingress.enabled=true", "ingress.host: empty"),
        ("doors.serviceType=LoadBalancer", "callers.cidrs: empty"),
        ("ingress.enabled=true,ingress.host=a.b,ingress.grpcHost=a.b", "ingress.grpcHost: the same as ingress.host"),
        ("settings.TAILRACE_MAX_RUNNING=0", "settings.TAILRACE_MAX_RUNNING: Must be"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(wrong: str, field: str) -> None:
    """Values that the schema or another value forbids end the command with the field."""
    assert field in refusal("--set", wrong)


def test_values_reach_their_places(tmp_path: Path) -> None:
    """Sizes, addresses, images and Secret names from the values are in the objects, which match Kubernetes' schemas."""
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
        "dependencyPorts": [9094],
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
    gateway = next(
        deployment
        for deployment in serve_config(things)["applications"][0]["deployments"]
        if deployment["name"] == "Gateway"
    )
    worker = pod_of(things, "tailrace-stream").container("worker")
    settings = settings_of(things, worker)
    hosts = {ingress["metadata"]["name"]: ingress["spec"]["rules"][0]["host"] for ingress in find(things, "Ingress")}

    assert {key: wrong for key, thing in by_name(things).items() if (wrong := complaints(thing, OLDEST))} == {}
    assert {thing["metadata"]["namespace"] for thing in things} == {"shop"}
    assert find(things, "PodMonitor") == find(things, "PrometheusRule") == []
    for pod in pods(things):
        assert pod.spec["imagePullSecrets"] == [{"name": "pull"}], pod.name
        assert pod.spec["nodeSelector"] == {"pool": "shop"}, pod.name
        assert pod.spec["tolerations"] == values["tolerations"], pod.name
        assert {container["image"] for container in pod.containers()} == {
            f"registry.example.com/tailrace@sha256:{'0' * 64}"
        }
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
    assert [port["port"] for port in ports] == [6379, 6390, 9092, 9094]
    assert hosts == {"tailrace-rest": "shop.example", "tailrace-grpc": "grpc.shop.example"}
    edge = pod_of(things, "tailrace-edge").container("edge")
    assert edge["args"][1] == "tailrace-ray.$(POD_NAMESPACE).svc.shop.example"
    head = pod_of(things, "tailrace-head").container("ray-head")
    assert "tailrace-standby.shop.svc.shop.example" in environment(things, head)["RAY_INGRESS_OPTIONS"]


S3 = {
    "bundles": {"store": "s3://bundles/tailrace", "cacheGib": 60, "secret": "s3-login", "ports": [443, 8333]},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/tailrace"}},
}
READERS = ("gateways", "llm", "standby", "release", "stream")
CHOICES: dict[str, dict[str, Any]] = {
    "own values": {},
    "the page's": yaml.safe_load(
        re.findall(r"```yaml\n(image: .*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)[0]
    ),
    "many names and tenants": yaml.safe_load(
        re.findall(r"---\n(# values.yaml.*?)```", (ROOT / "docs/many-models.md").read_text(), re.DOTALL)[0]
    ),
    "an object store": S3,
    "a load balancer": {"doors": {"serviceType": "LoadBalancer"}, "callers": {"cidrs": ["0.0.0.0/0"]}},
    "no TLS and no keys": {
        "tls": {"secret": ""},
        "apiKeys": {"secret": ""},
        "settings": {"TAILRACE_ALLOW_ANONYMOUS": True},
    },
}


def chosen(values: dict[str, Any], folder: Path, *options: str | Path, namespace: str = NAMESPACE) -> Things:
    """Return the objects of an install with these values."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return templated(*options, "--values", file, namespace=namespace)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", ["", *(pytest.param(kind, marks=pytest.mark.grid) for kind in ("gpu", "trial"))])
def test_every_reference_of_every_choice_resolves(choice: str, kind: str, tmp_path: Path) -> None:
    """Each referenced object, key, volume, port, image, namespace and selector is rendered or created by the page."""
    options = ("--values", CHART / f"values-{kind}.yaml") if kind else ()
    things = chosen(CHOICES[choice], tmp_path, *options, namespace="shop-staging")

    assert unresolved(things) == []
    assert {key: wrong for key, thing in by_name(things).items() if (wrong := complaints(thing, OLDEST))} == {}


def test_bundles_in_an_object_store_have_credentials_a_way_out_and_room(tmp_path: Path) -> None:
    """Every pod that reads bundles has the store's address and Secret, the account, egress, and a cache volume."""
    things = chosen(S3, tmp_path)
    egress = the(things, "NetworkPolicy", "tailrace-object-store")["spec"]
    account = the(things, "ServiceAccount", "tailrace")

    assert account["metadata"]["annotations"] == S3["serviceAccount"]["annotations"]
    assert [port["port"] for port in egress["egress"][0]["ports"]] == [443, 8333]
    for name in (*READERS, "train", "precompute"):
        pod = pod_of(things, f"tailrace-{name}")
        (container,) = [container for container in pod.spec["containers"] if container["name"] != "node-metrics"]
        settings = settings_of(things, container)
        assert (settings.bundle_store, settings.bundle_cache_gib) == ("s3://bundles/tailrace", 60)
        assert {"secretRef": {"name": "s3-login", "optional": True}} in container["envFrom"]
        assert pod.spec["serviceAccountName"] == "tailrace"
        assert matches(egress["podSelector"], pod.labels)
        if name in READERS:
            (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == str(settings.cache_dir)]
            (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
            assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) > settings.bundle_cache_gib


def test_callers_networks_and_namespaces_are_admitted() -> None:
    """Callers are admitted by address, as load balancers need, and by a namespace's name, without a label."""
    options = (
        "callers.cidrs={10.0.0.0/8},callers.namespaces={shop},"
        "callers.metricsNamespaces={obs},callers.operatorNamespaces={ray}"
    )
    things = templated("--set", options)
    admitted = {
        name: the(things, "NetworkPolicy", f"tailrace-{name}")["spec"]["ingress"][0]["from"][1:]
        for name in ("doors", "metrics", "operator")
    }

    def namespace(name: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    assert admitted == {
        "doors": [namespace("shop"), {"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "metrics": [namespace("obs")],
        "operator": [namespace("ray")],
    }


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ("redis.port=7000", [6379, 7000, 9093]),
        ("kafka.bootstrap=a:9094\\,b:9095", [6379, 9094, 9095]),
        ("rayRedis.address=redis://a:6400", [6379, 6400, 9093]),
        ("settings.TAILRACE_TEXT_URL=https://text.example/v1", [443, 6379, 9093]),
        ("settings.TAILRACE_TEXT_URL=http://[fd00::1]/v1", [80, 6379, 9093]),
    ],
)
def test_egress_follows_the_addresses(values: str, ports: list[int]) -> None:
    """Each port is written once: the ports that pods may call come from the addresses."""
    policy = the(templated("--set", values), "NetworkPolicy", "tailrace-dependencies")

    assert [port["port"] for port in policy["spec"]["egress"][0]["ports"]] == ports


def test_a_trial_needs_nothing_but_the_operator() -> None:
    """The trial values need no Secret, Redis, Kafka or collector, and fit a small node even during an upgrade."""
    things = templated("--values", CHART / "values-trial.yaml")
    needed = [secret for pod in pods(things) for secret in secrets_of(pod) if not secret.get("optional")]
    jobs = {job["metadata"]["name"] for kind in ("CronJob", "Job") for job in find(things, kind)}
    groups = the(things, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    counts = {f"tailrace-{group['groupName']}": group["minReplicas"] for group in groups}
    counts |= {
        workload["metadata"]["name"]: workload["spec"]["replicas"]
        for kind in ("Deployment", "StatefulSet")
        for workload in find(things, kind)
    }
    cpus, gib, ray_cpus, ray_gib = 0.0, 0.0, 0.0, 0.0
    for pod in (pod for pod in pods(things) if pod.name not in jobs):
        own = [counts.get(pod.name, 1) * number for number in requests_of(pod)]
        cpus, gib = cpus + own[0], gib + own[1]
        if pod.labels.get("tailrace.io/ray"):
            ray_cpus, ray_gib = ray_cpus + own[0], ray_gib + own[1]

    assert needed == []
    assert {service["spec"]["selector"].get("app.kubernetes.io/name") for service in find(things, "Service")} >= {
        "features-redis",
        "kafka",
    }
    assert (cpus, gib) < (4, 16)
    assert gib < 12
    assert (cpus + ray_cpus < 6, gib + ray_gib < 17) == (True, True)


def secrets_of(pod: Pod) -> Iterator[dict[str, Any]]:
    for volume in pod.spec.get("volumes", ()):
        for source in (volume, *volume.get("projected", {}).get("sources", ())):
            if "secret" in source:
                yield source["secret"]


def requests_of(pod: Pod) -> tuple[float, float]:
    """Return the CPUs and GiB that a pod requests."""
    cpus, gib = 0.0, 0.0
    for container in pod.containers():
        if container in pod.spec.get("initContainers", ()) and container.get("restartPolicy") != "Always":
            continue
        asked = container["resources"]["requests"]
        cpu, memory = str(asked["cpu"]), asked["memory"]
        cpus += float(cpu.removesuffix("m")) / (1_000 if cpu.endswith("m") else 1)
        gib += float(memory[:-2]) / (1 if memory.endswith("Gi") else 1_024)
    return cpus, gib


def test_the_first_training_waits_for_its_files(tmp_path: Path) -> None:
    """The first training waits for its files with the CronJob's options; a changed Job gets a new name."""
    things = templated()
    (job,) = find(things, "Job")
    pod = pod_of(things, job["metadata"]["name"])
    (container,), (wait,) = pod.spec["containers"], pod.spec["initContainers"]
    there, missing = tmp_path / "events.parquet", tmp_path / "items.parquet"
    there.touch()
    command = [*wait["command"][:4], f"--events={there}", "--warm-start"]

    assert container["command"] == ["python", "-m", "infra.docker", "pipeline"]
    assert container["args"] == wait["command"][4:] == pod_of(things, "tailrace-train").spec["containers"][0]["args"]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, f"--items={missing}"], timeout=0.3, check=False)
    (other,) = find(templated("--set", "image.tag=0.2.0"), "Job")
    assert other["metadata"]["name"] != job["metadata"]["name"]


def test_a_changed_setting_changes_the_pods() -> None:
    """The ConfigMap's name follows its content, so that Ray builds a new cluster and all pods are replaced."""
    before, after = (
        {
            source["configMapRef"]["name"]
            for pod in pods(things)
            for container in pod.containers()
            for source in container.get("envFrom", ())
            if "configMapRef" in source
        }
        for things in (templated(), templated("--set", "settings.TAILRACE_MAX_RUNNING=64"))
    )

    assert len(before) == len(after) == 2
    assert len(before & after) == 1


def test_the_first_deployment_is_eight_commands_that_fit_the_chart() -> None:
    """Helm renders the page's own options, and each object that a later command names exists."""
    section = (ROOT / "docs/kubernetes.md").read_text().partition("## First deployment\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh cluster\n(.*?)```", section, re.DOTALL)
    commands = block.strip().splitlines()
    (install,) = [shlex.split(line) for line in commands if line.startswith("helm install")]
    options = [word if not word.startswith("infra/") else ROOT / word for word in install[install.index("--values") :]]
    things = templated(*options)
    names = {f"{kind}/{name}".lower() for kind, name in by_name(things)} | {"job/data"}
    (first,) = find(things, "Job")

    assert len(commands) <= 8
    assert set(re.findall(r"\b(?:cronjob|rayservice|service|job)/[\w-]+", block)) <= names
    assert first["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "--events=/var/lib/tailrace/input/events.parquet",
        "--items=/var/lib/tailrace/input/items.parquet",
    ]
    assert unresolved(things) == []
