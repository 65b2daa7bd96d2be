"""References of every pod, and what keeps it confined."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from services.settings.settings import Settings
from services.stream.__main__ import erasing_files
from tests.support.manifests import ROOT, Pod, find, matches, pod_of, pods, settings_of, the

Things = list[dict[str, Any]]


def test_every_pod_is_confined(things: Things) -> None:
    """The namespace enforces restricted Pod Security; each root is read-only; service links would set TAILRACE_X_PORT, which the settings refuse as unknown."""
    assert the(things, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(things):
        assert pod.spec["enableServiceLinks"] is False, pod.name
        assert all(one["securityContext"]["readOnlyRootFilesystem"] for one in pod.containers()), pod.name


def test_every_reference_resolves(overlay: str, things: Things) -> None:
    """ConfigMaps and claims that pods name are rendered, and docs/kubernetes.md creates every secret and every optional ConfigMap with its keys."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    made = dict(
        re.findall(r"kubectl create (?:secret generic|secret tls|configmap) (\S+)(.*?)(?<!\\)\n", page, re.DOTALL)
    )
    maps, claims = (
        {one["metadata"]["name"] for one in find(things, kind)} for kind in ("ConfigMap", "PersistentVolumeClaim")
    )
    for pod in pods(things):
        sources = [source for one in pod.containers() for source in one.get("envFrom", ())]
        assert {source["configMapRef"]["name"] for source in sources} <= maps
        for volume in pod.spec["volumes"]:
            assert "configMap" not in volume or volume["configMap"]["name"] in maps, pod.name
            claim = volume.get("persistentVolumeClaim")
            assert claim is None or claim["claimName"] in claims, pod.name
            secrets = [one for source in volume.get("projected", {"sources": ()})["sources"] for one in source.values()]
            secrets += [volume["secret"] | {"name": volume["secret"]["secretName"]}] if "secret" in volume else []
            for secret in secrets:
                keys = [item["key"] for item in secret.get("items", ())]
                assert all(re.search(rf"--from-file={re.escape(key)}[= ]", made[secret["name"]]) for key in keys), (
                    secret["name"]
                )
    password = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].get("redisPassword")
    assert (password is None) == (overlay == "dev")
    assert password is None or password["valueFrom"]["secretKeyRef"]["name"] in made


def test_selectors_select_and_named_ports_exist(things: Things) -> None:
    """Each selector of a Service, budget, monitor, policy, spread or workload matches a kind of pod, which has the ports that are named."""
    every_pod = pods(things)
    for thing in things:
        spec, name = thing.get("spec", {}), f"{thing['kind']}/{thing['metadata']['name']}"
        selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
        if thing["kind"] == "Service":
            selectors = [{"matchLabels": spec["selector"]}]
        for selector in selectors:
            selected = [pod for pod in every_pod if matches(selector, pod.labels)]
            given = [port for pod in selected for one in pod.containers() for port in one.get("ports", ())]
            wanted = {port["targetPort"] for port in spec.get("ports", ())}
            wanted |= {one["port"] for one in spec.get("podMetricsEndpoints", ())}
            assert selected, name
            assert wanted <= {port[key] for port in given for key in ("name", "containerPort")}, name
        if thing["kind"] in {"StatefulSet", "Deployment"}:
            assert matches(spec["selector"], spec["template"]["metadata"]["labels"]), name
    for pod in every_pod:
        spreads = [one["labelSelector"] for one in pod.spec.get("topologySpreadConstraints", ())]
        assert all(matches(selector, pod.labels) for selector in spreads), pod.name
        for container in pod.containers():
            probes = [container[key] for key in container if key.endswith("Probe")]
            asked = {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}
            assert asked <= {port["name"] for port in container.get("ports", ())}, (pod.name, container["name"])


def on_claim(pod: Pod, container: str, path: Path) -> tuple[str, str] | None:
    """Return the claim that holds a path of a container, and the path within it; None where no claim does."""
    claims = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod.spec["volumes"]
        if "persistentVolumeClaim" in one
    }
    mounts = [one for one in pod.container(container)["volumeMounts"] if path.is_relative_to(one["mountPath"])]
    mount = max(mounts, key=lambda one: len(one["mountPath"]))
    if mount["name"] not in claims:
        return None
    within = Path(mount.get("subPath", ".")) / path.relative_to(mount["mountPath"])
    return claims[mount["name"]], str(within)


def shared_paths(settings: Settings) -> set[Path]:
    """The paths from which a worker takes erased users."""
    files = erasing_files(settings, {})
    return {value for one in fields(files) if isinstance(value := getattr(files, one.name), Path)}


def test_a_worker_sees_every_store_of_a_receipt_where_the_pipeline_writes_it(things: Things) -> None:
    """Each path is on the same claim, at the same place; gateways start from the snapshot of items that the worker writes."""
    worker, train = pod_of(things, "tailrace-stream"), pod_of(things, "tailrace-train")
    settings = settings_of(things, worker.container("worker"))

    for path in shared_paths(settings):
        place = on_claim(worker, "worker", path)
        assert place is not None, path
        assert place == on_claim(train, "pipeline", path), path
    for name, container in (("tailrace-gateways", "ray-worker"), ("tailrace-standby", "standby")):
        place = on_claim(pod_of(things, name), container, settings.items_snapshot)
        assert place is not None
        assert place == on_claim(worker, "worker", settings.items_snapshot)


def test_compose_mounts_the_whole_state_where_users_are_erased_and_items_are_read() -> None:
    """The volume `state` has all of the paths above."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("worker", "pipeline", "prepare"):
        assert "state:/state" in services[name]["volumes"], name
    for name in ("serve", "standby"):
        assert any(one.startswith("state:/state") for one in services[name]["volumes"]), name
