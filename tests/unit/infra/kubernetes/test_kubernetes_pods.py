"""Confinement, bounds, volumes and references of every pod."""

import re

import pytest

from tests.support.manifests import OVERLAYS, ROOT, Pod, find, matches, pod_of, pods, render, the

RAY = {"tailrace-head", "tailrace-gateways", "tailrace-llm"}
IMAGE_VOLUMES = {
    "apache/kafka": frozenset({"/etc/kafka/secrets", "/var/lib/kafka/data", "/mnt/shared/config"}),
    "redis": frozenset({"/data"}),
}
"""The VOLUMEs that foreign images declare."""


def confinement(pod: Pod) -> list[str]:
    """Return what breaks Pod Security's level `restricted` or a read-only root."""
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
    """Every container fits restricted Pod Security, which the namespace enforces, and has a read-only root.

    No pod has service links: a Service called tailrace-x would set TAILRACE_X_PORT, which the settings refuse as unknown.
    """
    things = render(overlay)
    enforced = the(things, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    autoscaler = the(things, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]["securityContext"]

    wrong = {pod.name: confinement(pod) for pod in pods(things)}

    assert {name: found for name, found in wrong.items() if found} == {}
    assert not [pod.name for pod in pods(things) if pod.spec.get("enableServiceLinks") is not False]
    assert enforced == "restricted"
    assert autoscaler == pod_of(things, "tailrace-head").containers()[0]["securityContext"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_is_bounded_and_its_volumes_fit(overlay: str) -> None:
    """Requests, a memory limit, and bounded volumes; every mount has its volume and the reverse.

    A runtime mounts each VOLUME of an image, and cannot do so below a ConfigMap: the container would never start.
    """
    for pod in pods(render(overlay)):
        mounted, volumes = set(), {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers():
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"}, (pod.name, container["name"])
            assert "memory" in container["resources"]["limits"], (pod.name, container["name"])
            mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", ())}
            mounted |= set(mounts.values())
            inside = IMAGE_VOLUMES.get(container["image"].partition(":")[0], frozenset())
            for place, name in mounts.items():
                if volumes.get(name, {}).keys() & {"configMap", "secret", "projected"}:
                    assert not [path for path in inside if path.startswith(f"{place}/")], pod.name
        assert mounted == volumes.keys() | ({"data"} if pod.name == "tailrace-kafka" else set()), pod.name
        for name, volume in volumes.items():
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (pod.name, name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_reference_resolves(overlay: str) -> None:
    """ConfigMaps and claims that pods name are rendered, and docs/kubernetes.md creates every secret with its keys."""
    things = render(overlay)
    page = (ROOT / "docs/kubernetes.md").read_text()
    made = dict(re.findall(r"kubectl create secret (?:generic|tls) (\S+)(.*?)(?<!\\)\n", page, re.DOTALL))
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select(overlay: str) -> None:
    """Each selector of a Service, budget, monitor, policy, spread or workload matches at least one kind of pod."""
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
def test_named_ports_exist(overlay: str) -> None:
    """Probes, Services and the monitor name ports of the containers that they select."""
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
