"""Allowed connections, evaluated from the NetworkPolicies."""

from typing import Any

import pytest

from tests.support.manifests import find, matches, pod_of, pods, settings_of, the

NAMESPACES = {
    "tailrace": {"kubernetes.io/metadata.name": "tailrace"},
    "ingress": {"tailrace.io/may-call": "doors"},
    "monitoring": {"tailrace.io/may-call": "metrics"},
    "kuberay": {"tailrace.io/may-call": "ray"},
    "kube-system": {"kubernetes.io/metadata.name": "kube-system"},
    "stranger": {"kubernetes.io/metadata.name": "default"},
    "169.254.20.10/32": {},
}
"""Labels of each namespace that a peer can be in; the last entry is an external address."""
STRANGERS = {"app": "anything"}
DNS = {"k8s-app": "kube-dns"}
DOORS = {8000, 9000}
INGRESS = {18000, 19000}
STANDBY = {18001, 19001}
METRICS = {8080, 9100}
INNER = {6379, 8265, 10001, 10002, 19999, 30000, 40000, 52365, 9101, 8404}
"""GCS, dashboard, client, first and last worker port, replica ports, agent, HAProxy metrics and statistics."""
DASHBOARD = {8265, 18000}
RAY = ("ray-head", "gateway", "llm")
OPEN_TO: dict[str, dict[str, set[int]]] = {
    "ingress": {"edge": DOORS},
    "monitoring": dict.fromkeys((*RAY, "edge", "standby", "stream", "release", "pipeline", "data"), METRICS),
    "kuberay": dict.fromkeys(RAY, DASHBOARD),
    "stranger": {},
}
"""Reachable ports of each component, by the namespace of the caller."""


def is_peer(peer: dict[str, Any], namespace: str, labels: dict[str, str]) -> bool:
    """Return whether a rule's peer matches this pod; a peer without a namespace selector is in our own namespace."""
    if "ipBlock" in peer:
        return bool(namespace == peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        is_there = matches(peer["namespaceSelector"], NAMESPACES[namespace])
    else:
        is_there = namespace == "tailrace"
    return is_there and matches(peer.get("podSelector", {}), labels)


def open_ports(
    things: list[dict[str, Any]], way: str, own: dict[str, str], namespace: str, labels: dict[str, str], among: set[int]
) -> set[int]:
    """Return the ports on which pods with labels `own` may accept (ingress) or open (egress) connections."""
    policies = [
        policy["spec"]
        for policy in find(things, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], own) and way.capitalize() in policy["spec"]["policyTypes"]
    ]
    assert policies, "no policy selects the pod, so that all would be allowed"
    ports: set[int] = set()
    for rule in (rule for spec in policies for rule in spec.get(way, ())):
        peers = rule.get("from" if way == "ingress" else "to")
        if peers is None or any(is_peer(peer, namespace, labels) for peer in peers):
            ranges = [(port["port"], port.get("endPort", port["port"])) for port in rule.get("ports", ())]
            ports |= {port for port in among if not ranges or any(first <= port <= last for first, last in ranges)}
    return ports


@pytest.mark.parametrize("namespace", OPEN_TO)
def test_other_namespaces_reach_only_public_ports(things: list[dict[str, Any]], namespace: str) -> None:
    """Callers reach the API ports, Prometheus the metrics, the operator the dashboard; other namespaces are blocked."""
    every_port = DOORS | INGRESS | STANDBY | METRICS | INNER
    reached = {
        pod.labels.get("app.kubernetes.io/component", pod.name): ports
        for pod in pods(things)
        if (ports := open_ports(things, "ingress", pod.labels, namespace, STRANGERS, every_port))
    }

    assert reached == OPEN_TO[namespace]


@pytest.mark.parametrize(
    ("caller", "callee", "ports"),
    [
        ("edge", "gateways", INGRESS),
        ("edge", "llm", INGRESS),
        ("edge", "standby", STANDBY),
        ("gateways", "standby", STANDBY),
        ("stream", "gateways", set()),
        ("stream", "standby", set()),
    ],
)
def test_only_the_edge_reaches_the_ingress_and_only_both_the_standby(
    things: list[dict[str, Any]], caller: str, callee: str, ports: set[int]
) -> None:
    """The edge reaches the ingress and standby but not store or broker; Ray's HAProxy also reaches the standby."""
    source, other, edge = (pod_of(things, f"tailrace-{name}").labels for name in (caller, callee, "edge"))

    assert open_ports(things, "ingress", other, "tailrace", source, INGRESS | STANDBY) == ports
    assert not ports or open_ports(things, "egress", source, "tailrace", other, INGRESS | STANDBY) == ports
    assert open_ports(things, "egress", edge, "stranger", STRANGERS, {6379, 9092, 443}) == set()
    assert open_ports(things, "egress", edge, "kube-system", DNS, {53}) == {53}


def test_egress_is_to_the_ports_of_the_addresses(things: list[dict[str, Any]]) -> None:
    """The policy opens exactly the ports of the settings' addresses and of Ray's Redis."""
    settings = settings_of(things, pod_of(things, "tailrace-stream").container("worker"))
    ray = the(things, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    kafka = [address.rpartition(":")[2] for address in settings.kafka_bootstrap.split(",")]
    wanted = {settings.redis_port, *map(int, kafka), int(ray.rpartition(":")[2])}
    (rule,) = the(things, "NetworkPolicy", "tailrace-dependencies")["spec"]["egress"]

    assert {port["port"] for port in rule["ports"]} == wanted
    assert settings.otlp_endpoint == "", "no collector is required"


def test_the_cache_of_bundles_fits_into_its_volume(things: list[dict[str, Any]]) -> None:
    """The cache volume has at least 4 GiB more than the cache limit, for bundles in use."""
    sizes = {
        pod.name: (settings_of(things, container).bundle_cache_gib, volume["emptyDir"]["sizeLimit"])
        for pod in pods(things)
        for container in pod.containers()
        for volume in pod.spec.get("volumes", ())
        if volume["name"] == "cache"
        and {"name": "cache", "mountPath": "/var/lib/tailrace/cache"} in container.get("volumeMounts", ())
    }

    assert len(sizes) == 5
    assert all(float(limit.removesuffix("Gi")) >= gib + 4 for gib, limit in sizes.values())
