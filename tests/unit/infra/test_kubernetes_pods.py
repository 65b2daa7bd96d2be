"""What every pod must be: confined, bounded, complete. `pytest tests/unit/infra/test_kubernetes_pods.py`."""

import re

import pytest

from tests.support.manifests import OVERLAYS, ROOT, Pod, find, matches, pod_of, pods, render, the

RAY = {"tailrace-head", "tailrace-gateways", "tailrace-llm"}
IMAGE_VOLUMES = {
    "apache/kafka": frozenset({"/etc/kafka/secrets", "/var/lib/kafka/data", "/mnt/shared/config"}),
    "redis": frozenset({"/data"}),
}
"""What the recipes of images that are not ours declare by VOLUME."""


def confinement(pod: Pod) -> list[str]:
    """What Pod Security's level `restricted`, and a read-only root, would refuse about a pod."""
    wrong = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(key)]
    wrong += [f"volume {one['name']}" for one in pod.spec.get("volumes", ()) if "hostPath" in one]
    if not pod.spec["securityContext"].get("runAsUser"):
        wrong.append("no user")
    for container in pod.containers():
        context = container.get("securityContext", {})
        for key, value in {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items():
            if context.get(key) != value:
                wrong.append(f"{container['name']}: {key}")
        wrong += [f"{container['name']}: host port" for port in container.get("ports", ()) if "hostPort" in port]
    return wrong


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_confined(overlay: str) -> None:
    """Restricted Pod Security and a read-only root, for every container; and the namespace enforces the former."""
    things = render(overlay)
    enforced = the(things, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    autoscaler = the(things, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]["securityContext"]

    wrong = {pod.name: confinement(pod) for pod in pods(things)}

    assert {name: found for name, found in wrong.items() if found} == {}
    assert enforced == "restricted"
    assert autoscaler == pod_of(things, "tailrace-head").containers()[0]["securityContext"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_is_bounded(overlay: str) -> None:
    """Each asks for CPU and memory and has a limit of memory; each volume in memory or on the node has a size."""
    for pod in pods(render(overlay)):
        for container in pod.containers():
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"}, (pod.name, container["name"])
            assert "memory" in container["resources"]["limits"], (pod.name, container["name"])
        for volume in pod.spec["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (pod.name, volume["name"])


def test_a_trial_fits_on_its_node() -> None:
    """Of 6 cores and 16 GiB, 2 cores and 3 GiB are for the node's own pods and the operators; training runs beside all others."""
    things = render("dev")
    cluster = the(things, "RayService")["spec"]["rayClusterConfig"]
    count = {f"tailrace-{group['groupName']}": group["minReplicas"] for group in cluster["workerGroupSpecs"]}
    count |= {one["metadata"]["name"]: one["spec"]["replicas"] for one in find(things, "StatefulSet")}
    wanted = [cluster["autoscalerOptions"]["resources"]["requests"]]
    for pod in pods(things):
        running = [one for one in pod.containers() if one["name"] not in {"topics", "format"}]
        wanted += [one["resources"]["requests"] for one in running] * count.get(pod.name, 1)

    assert sum(cores(one["cpu"]) for one in wanted) <= 4
    assert sum(mebibytes(one["memory"]) for one in wanted) <= 13 * 1024


def cores(amount: str) -> float:
    """Processors, from Kubernetes' way to write them."""
    return int(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)


def mebibytes(amount: str) -> int:
    """Memory, from Kubernetes' way to write it."""
    return int(amount[:-2]) * {"Mi": 1, "Gi": 1024}[amount[-2:]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_mounts_and_volumes_fit(overlay: str) -> None:
    """Each mount names a volume of its pod, each volume is mounted, and /tmp can be written."""
    for pod in pods(render(overlay)):
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        volumes |= {"data"} if pod.name == "tailrace-kafka" else set()
        mounted = {mount["name"] for one in pod.containers() for mount in one.get("volumeMounts", ())}

        assert mounted == volumes, pod.name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_read_only_mount_lies_above_a_volume_of_its_image(overlay: str) -> None:
    """A runtime mounts each VOLUME of an image, and finds no room for it in a ConfigMap: the container would never start."""
    for pod in pods(render(overlay)):
        kept = {
            volume["name"] for volume in pod.spec["volumes"] if volume.keys() & {"configMap", "secret", "projected"}
        }
        for container in pod.containers():
            inside = IMAGE_VOLUMES.get(container["image"].partition(":")[0], frozenset())
            mounts = {one["mountPath"] for one in container.get("volumeMounts", ()) if one["name"] in kept}
            assert [path for path in inside for mount in mounts if path.startswith(f"{mount}/")] == [], pod.name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_edge_calls_the_pods_that_have_an_ingress(overlay: str) -> None:
    """Gateways and LLM replicas, never the head, which is ready without an ingress."""
    things = render(overlay)
    selector = {"matchLabels": the(things, "Service", "tailrace-ray")["spec"]["selector"]}

    taken = {pod.name for pod in pods(things) if matches(selector, pod.labels)}

    assert taken == {"tailrace-gateways", "tailrace-llm"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_service_sets_variables(overlay: str) -> None:
    """A Service called tailrace-x would set TAILRACE_X_PORT in every pod, which settings.py refuses as unknown."""
    assert {pod.name: pod.spec.get("enableServiceLinks") for pod in pods(render(overlay))} == {
        pod.name: False for pod in pods(render(overlay))
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_sums_metrics_sees_whose_they_are(overlay: str) -> None:
    """telemetry.node_registry drops the gauges of pids that /proc lacks, so its container must see the others' processes."""
    watched = [pod for pod in pods(render(overlay)) if "node-metrics" in {one["name"] for one in pod.containers()}]

    assert {pod.name for pod in watched} == {"tailrace-gateways", "tailrace-llm", "tailrace-stream"}
    assert all(pod.spec["shareProcessNamespace"] for pod in watched)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_runs_beside_ray_is_started_again(overlay: str) -> None:
    """KubeRay sets Ray's pods to restart nothing and replaces them for Ray's container alone, so the others ask for it themselves."""
    for name in sorted(RAY):
        spec = pod_of(render(overlay), name).spec

        assert len(spec["containers"]) == 1, name
        assert {one["restartPolicy"] for one in spec.get("initContainers", ())} <= {"Always"}, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_has_memory_to_share(overlay: str) -> None:
    """/dev/shm is a volume in memory, larger than the object store."""
    cluster = the(render(overlay), "RayService")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod, group in zip([pod for pod in pods(render(overlay)) if pod.name in RAY], groups, strict=True):
        (shm,) = [one["emptyDir"] for one in pod.spec["volumes"] if one["name"] == "shm"]

        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"].removesuffix("Mi")) * 2**20 > int(group["rayStartParams"]["object-store-memory"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_reference_leads_somewhere(overlay: str) -> None:
    """ConfigMaps, claims and services that pods name are rendered; secrets are, or the docs tell how to make them."""
    things = render(overlay)
    made = dict(re.findall(r"kubectl create secret (?:generic|tls) (\S+)(.*?)(?<!\\)\n", docs(), re.DOTALL))
    maps = {one["metadata"]["name"] for one in find(things, "ConfigMap")}
    claims = {one["metadata"]["name"] for one in find(things, "PersistentVolumeClaim")}
    for pod in pods(things):
        for container in pod.containers():
            assert {source["configMapRef"]["name"] for source in container.get("envFrom", ())} <= maps
        for volume in pod.spec["volumes"]:
            assert volume.get("configMap", {"name": next(iter(maps))})["name"] in maps
            assert volume.get("persistentVolumeClaim", {"claimName": next(iter(claims))})["claimName"] in claims
            for source in volume.get("projected", {"sources": ()})["sources"]:
                secret = source["secret"]
                keys = {item["key"] for item in secret["items"]}
                assert all(f"--from-file={key}=" in made[secret["name"]] for key in keys), secret["name"]
            secret = volume.get("secret", {"secretName": next(iter(made))})
            assert secret["secretName"] in made
            assert all(f"--from-file={item['key']}=" in made[secret["secretName"]] for item in secret.get("items", ()))
    password = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].get("redisPassword")
    assert (password is None) == (overlay == "dev")
    assert password is None or password["valueFrom"]["secretKeyRef"]["name"] in made


def docs() -> str:
    """The page that an operator follows."""
    return (ROOT / "docs/kubernetes.md").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select(overlay: str) -> None:
    """Each selector of a Service, budget, monitor, policy, spread or workload takes at least one kind of pod."""
    things = render(overlay)
    labels = [pod.labels for pod in pods(things)]
    for thing in things:
        spec = thing.get("spec", {})
        selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
        if thing["kind"] == "Service":
            selectors = [{"matchLabels": spec["selector"]}]
        for selector in selectors:
            assert any(matches(selector, one) for one in labels), f"{thing['kind']}/{thing['metadata']['name']}"
    for pod in pods(things):
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert matches(constraint["labelSelector"], pod.labels), pod.name
    for workload in [*find(things, "StatefulSet"), *find(things, "Deployment")]:
        template = workload["spec"]["template"]["metadata"]["labels"]
        assert matches(workload["spec"]["selector"], template), workload["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_that_are_named_exist(overlay: str) -> None:
    """Probes, Services and the monitor name ports that a container of the pods they take has."""
    things = render(overlay)
    for pod in pods(things):
        for container in pod.containers():
            names = {port["name"] for port in container.get("ports", ())}
            probes = [container[key] for key in container if key.endswith("Probe")]
            asked = {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}
            assert asked <= names, (pod.name, container["name"])
    for thing in [*find(things, "Service"), *find(things, "PodMonitor")]:
        spec = thing["spec"]
        selector = spec["selector"] if thing["kind"] == "PodMonitor" else {"matchLabels": spec["selector"]}
        taken = [pod for pod in pods(things) if matches(selector, pod.labels)]
        ports = [port for pod in taken for one in pod.containers() for port in one.get("ports", ())]
        there = {port[key] for port in ports for key in ("name", "containerPort")}
        wanted = {port["targetPort"] for port in spec.get("ports", ())}
        assert wanted | {one["port"] for one in spec.get("podMetricsEndpoints", ())} <= there, thing["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_drained_node_takes_one_of_a_kind(overlay: str) -> None:
    """The budgets leave one to go. A RayCluster has no scale subresource, so Ray's pods need a number that must stay."""
    things = render(overlay)
    budgets = find(things, "PodDisruptionBudget")
    groups = the(things, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    least = {f"tailrace-{group['groupName']}": group["minReplicas"] for group in groups}
    taken = {
        pod.name: one["spec"] for one in budgets for pod in pods(things) if matches(one["spec"]["selector"], pod.labels)
    }

    assert taken.keys() == {"tailrace-edge", "tailrace-gateways", "tailrace-stream"}
    assert {taken[name]["maxUnavailable"] for name in ("tailrace-edge", "tailrace-stream")} == {1}
    assert "maxUnavailable" not in taken["tailrace-gateways"]
    assert taken["tailrace-gateways"]["minAvailable"] == least["tailrace-gateways"] - 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_has_probes_of_our_own(overlay: str) -> None:
    """KubeRay puts its own where one is missing, and those need wget, which the image lacks."""
    for name in sorted(RAY):
        container = pod_of(render(overlay), name).containers()[0]
        assert {"livenessProbe", "readinessProbe"} <= container.keys(), name
