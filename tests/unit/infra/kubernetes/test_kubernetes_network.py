"""Allowed connections, evaluated from the NetworkPolicies."""

from typing import Any

import pytest

from infra.local.supervisor.parts import broker_address
from tests.support.manifests import OVERLAYS, environment, find, matches, pod_of, pods, render, the

NAMESPACES = {
    "tailrace": {"kubernetes.io/metadata.name": "tailrace"},
    "ingress": {"tailrace.io/may-call": "doors"},
    "monitoring": {"tailrace.io/may-call": "metrics"},
    "kuberay": {"tailrace.io/may-call": "ray"},
    "kube-system": {"kubernetes.io/metadata.name": "kube-system"},
    "stranger": {"kubernetes.io/metadata.name": "default"},
    "169.254.20.10/32": {},
}
"""The labels of each namespace that a peer may be in; the last is an address outside all of them."""
STRANGERS = {"app": "anything"}
DOORS = {8000, 9000}
INGRESS = {18000, 19000}
STANDBY = {18001, 19001}
METRICS = {8080, 9100}
INNER = {6379, 8265, 10001, 10002, 19999, 30000, 40000, 52365, 9101, 8404}
"""GCS, dashboard, client, workers' first and last, replicas' own doors, agent, HAProxy's metrics and statistics."""


def allows(policy: dict[str, Any], way: str, namespace: str, labels: dict[str, str], port: int) -> bool:
    """Return whether one policy allows this peer on this port; a peer without a namespace is in our own."""
    for rule in policy["spec"].get(way, ()):
        ports = rule.get("ports")
        if ports is not None and not any(one["port"] <= port <= one.get("endPort", one["port"]) for one in ports):
            continue
        peers = rule.get("from" if way == "ingress" else "to")
        if peers is None:
            return True
        for peer in peers:
            if "ipBlock" in peer:
                if namespace == peer["ipBlock"]["cidr"]:
                    return True
                continue
            home = "namespaceSelector" not in peer and namespace == "tailrace"
            away = "namespaceSelector" in peer and matches(peer["namespaceSelector"], NAMESPACES[namespace])
            if (home or away) and matches(peer.get("podSelector", {}), labels):
                return True
    return False


def allowed(
    things: list[dict[str, Any]], way: str, own: dict[str, str], namespace: str, labels: dict[str, str], port: int
) -> bool:
    """Return whether a pod with labels `own` may accept (ingress) or open (egress) a connection under all policies."""
    about = [
        one
        for one in find(things, "NetworkPolicy")
        if matches(one["spec"]["podSelector"], own) and way.capitalize() in one["spec"]["policyTypes"]
    ]
    assert about, "no policy selects the pod, so that all would be allowed"
    return any(allows(one, way, namespace, labels, port) for one in about)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("namespace", ["ingress", "monitoring", "kuberay", "stranger"])
def test_other_namespaces_reach_only_public_ports(overlay: str, namespace: str) -> None:
    """Callers reach the doors, Prometheus the metrics, the operator the dashboard, other namespaces nothing."""
    things = render(overlay)
    open_to = {
        component: {
            port
            for port in DOORS | INGRESS | STANDBY | METRICS | INNER
            if allowed(things, "ingress", pod.labels, namespace, STRANGERS, port)
        }
        for pod in pods(things)
        for component in [pod.labels.get("app.kubernetes.io/component", pod.name)]
    }
    doors, metrics, ray = (namespace == name for name in ("ingress", "monitoring", "kuberay"))

    for component, ports in open_to.items():
        is_ray = component in {"ray-head", "gateway", "llm"}
        is_ours = is_ray or component in {"edge", "standby", "stream", "pipeline"}
        expected: set[int] = set()
        expected |= DOORS if doors and component == "edge" else set()
        expected |= METRICS if metrics and is_ours else set()
        expected |= {8265, 18000} if ray and is_ray else set()
        assert ports == expected, (component, namespace)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_edge_reaches_the_ingress_and_only_both_the_standby(overlay: str) -> None:
    """Their ports are open to the edge, which reaches no store and no broker, and the standby's to Ray's HAProxy too."""
    things = render(overlay)
    edge, stream = (pod_of(things, name).labels for name in ("tailrace-edge", "tailrace-stream"))
    for name, ports in (("gateways", INGRESS), ("llm", INGRESS), ("standby", STANDBY)):
        labels = pod_of(things, f"tailrace-{name}").labels
        for way, own, peer in (("ingress", labels, edge), ("egress", edge, labels)):
            open_ports = {
                port for port in INGRESS | STANDBY | INNER if allowed(things, way, own, "tailrace", peer, port)
            }
            assert open_ports == ports, (name, way)
        assert not any(allowed(things, "ingress", labels, "tailrace", stream, port) for port in ports)
    standby, gateway = (pod_of(things, f"tailrace-{name}").labels for name in ("standby", "gateways"))
    for way, own, peer in (("ingress", standby, gateway), ("egress", gateway, standby)):
        assert {port for port in STANDBY | METRICS if allowed(things, way, own, "tailrace", peer, port)} == STANDBY
    assert not any(allowed(things, "egress", edge, "stranger", STRANGERS, port) for port in (6379, 9092, 443))
    assert allowed(things, "egress", edge, "kube-system", {"k8s-app": "kube-dns"}, 53)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_dependency_can_be_reached(overlay: str) -> None:
    """DNS, Redis, Kafka, traces and Ray's Redis are reachable at the ports of the settings and the RayService."""
    things = render(overlay)
    gateway = pod_of(things, "tailrace-gateways")
    variables = environment(things, gateway.containers()[0])
    gcs = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    wanted = {int(variables["TAILRACE_REDIS_PORT"]), broker_address(variables["TAILRACE_KAFKA_BOOTSTRAP"])[1]}
    traces = variables.get("TAILRACE_OTLP_ENDPOINT", "http://nowhere:4317")
    for name in ("tailrace-gateways", "tailrace-standby", "tailrace-stream", "tailrace-train"):
        own = pod_of(things, name).labels
        for port in wanted | {int(traces.rpartition(":")[2])}:
            assert allowed(things, "egress", own, "stranger", STRANGERS, port), (name, port)
        assert allowed(things, "egress", own, "kube-system", {"k8s-app": "kube-dns"}, 53)
        assert allowed(things, "egress", own, "169.254.20.10/32", {}, 53), "a node's own DNS cache has no pod"
        assert not allowed(things, "egress", own, "stranger", STRANGERS, 22)
    head = pod_of(things, "tailrace-head").labels
    assert allowed(things, "egress", head, "stranger", STRANGERS, int(gcs.rpartition(":")[2]))
    assert all(allowed(things, "egress", head, "stranger", STRANGERS, port) for port in (443, 6443, 8443))
    assert not allowed(things, "egress", gateway.labels, "stranger", STRANGERS, 443)
