"""Find unresolved references of a rendering: object names, volumes, ports, selectors, images, namespaces."""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.manifests import ROOT, Pod, Thing, environment, find, matches, pods, with_namespace

_HOST = re.compile(r"(?<![\w.-])(tailrace-[a-z-]+?)(?:\.([a-z-]+)\.svc[\w.-]*)?(?::(\d+))?(?=$|[\s,/\"])")
"""Match a Service's name in an address, by the surrounding text."""
_FOREIGN = {"kube-system", "monitoring", "data", "shop"}
"""Namespaces in addresses that the operator gives."""


def unresolved(things: list[Thing]) -> list[str]:
    """Return a line for each unresolved reference of these objects."""
    every_pod = pods(things)
    lines = [
        *_unnamed(things),
        *(line for pod in every_pod for line in _of_pod(things, pod)),
        *(line for thing in things for line in _of_object(things, thing, every_pod)),
        *_hosts(things),
    ]
    return list(dict.fromkeys(lines))


def documented() -> dict[str, str]:
    """Map each Secret and ConfigMap that docs/kubernetes.md creates to its command's arguments."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    command = r"kubectl(?: -n \S+)? create (?:secret generic|secret tls|configmap) (\S+)(.*?)(?<!\\)\n"
    return dict(re.findall(command, page, re.DOTALL))


def _unnamed(things: list[Thing]) -> Iterator[str]:
    """Yield duplicate objects, and objects in another namespace."""
    named = [(thing["kind"], thing["metadata"]["name"]) for thing in things]
    yield from (f"{kind}/{name}: twice" for kind, name in set(named) if named.count((kind, name)) > 1)
    spaces = {thing["metadata"].get("namespace") for thing in things if thing["kind"] != "Namespace"}
    if len(spaces) != 1 or None in spaces:
        yield f"namespaces: {sorted(map(str, spaces))}"
    yield from (
        f"Namespace/{namespace['metadata']['name']}"
        for namespace in find(things, "Namespace")
        if namespace["metadata"]["name"] not in spaces
    )


def _of_pod(things: list[Thing], pod: Pod) -> Iterator[str]:
    made = documented()
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())} | {name: {} for name in pod.claims}
    account = pod.spec.get("serviceAccountName", "default")
    if account != "default" and not find(things, "ServiceAccount", account):
        yield f"{pod.name}: ServiceAccount {account}"
    for kind, name, keys, is_optional in _sources(pod):
        given = find(things, kind, name)
        text = made.get(name, "")
        if not given and name not in made and not is_optional:
            yield f"{pod.name}: {kind} {name}"
        for key in keys:
            data = {**given[0].get("data", {}), **given[0].get("stringData", {})} if given else {}
            is_tls = key in {"tls.crt", "tls.key"} and "--cert=" in text
            if (
                not (given or (is_optional and not text))
                and not is_tls
                and not re.search(rf"--from-file={re.escape(key)}[= ]", text)
            ):
                yield f"{pod.name}: key {key} of {kind} {name}"
            if given and key not in data:
                yield f"{pod.name}: key {key} of {kind} {name}"
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and not find(things, "PersistentVolumeClaim", claim):
            yield f"{pod.name}: PersistentVolumeClaim {claim}"
    for container in pod.containers():
        where = f"{pod.name}/{container['name']}"
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        yield from (f"{where}: volume {name}" for name in mounts - volumes.keys())
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        yield from (f"{where}: two mounts at {path}" for path in set(paths) if paths.count(path) > 1)
        if not re.search(r":[\w.-]+$|@sha256:[0-9a-f]{64}$", container["image"]):
            yield f"{where}: image {container['image']} without tag"
        ports = {port["name"] for port in container.get("ports", ())}
        probes = [container[key] for key in container if key.endswith("Probe")]
        asked = {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}
        yield from (f"{where}: port {port}" for port in asked - ports)
    for spread in pod.spec.get("topologySpreadConstraints", ()):
        if not matches(spread["labelSelector"], pod.labels):
            yield f"{pod.name}: spread over other pods"
    unused = volumes.keys() - {
        mount["name"] for container in pod.containers() for mount in container.get("volumeMounts", ())
    }
    yield from (f"{pod.name}: volume {name} that nothing mounts" for name in unused)


def _sources(pod: Pod) -> Iterator[tuple[str, str, list[str], bool]]:
    """Yield each ConfigMap and Secret of a pod: kind, name, keys, and whether it is optional."""
    for secret in pod.spec.get("imagePullSecrets", ()):
        yield "Secret", secret["name"], [], True
    for container in pod.containers():
        for source in container.get("envFrom", ()):
            for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if key in source:
                    yield kind, source[key]["name"], [], source[key].get("optional", False)
        for variable in container.get("env", ()):
            for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if given := variable.get("valueFrom", {}).get(key):
                    yield kind, given["name"], [given["key"]], given.get("optional", False)
    for volume in pod.spec.get("volumes", ()):
        sources = [volume, *volume.get("projected", {}).get("sources", ())]
        for source in sources:
            for key, kind, name in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
                if given := source.get(key):
                    keys = [item["key"] for item in given.get("items", ())]
                    yield kind, given.get(name) or given["name"], keys, given.get("optional", False)


def _of_object(things: list[Thing], thing: Thing, every_pod: list[Pod]) -> Iterator[str]:
    spec, name = thing.get("spec", {}), f"{thing['kind']}/{thing['metadata']['name']}"
    selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
    if thing["kind"] == "Service":
        selectors = [{"matchLabels": spec["selector"]}]
    for rule in (rule for way in ("ingress", "egress") for rule in spec.get(way, ()) if isinstance(rule, dict)):
        peers = (peer for peer in (*rule.get("from", ()), *rule.get("to", ())) if "namespaceSelector" not in peer)
        selectors += [peer["podSelector"] for peer in peers if "podSelector" in peer]
    wanted = {port["targetPort"] for port in spec.get("ports", ()) if thing["kind"] == "Service"}
    wanted |= {endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", ())}
    for selector in selectors:
        selected = [pod for pod in every_pod if matches(selector, pod.labels)]
        given = [port for pod in selected for container in pod.containers() for port in container.get("ports", ())]
        if not selected:
            yield f"{name}: selects no pod by {selector}"
        for port in wanted - {port[key] for port in given for key in ("name", "containerPort")}:
            yield f"{name}: port {port}"
    if thing["kind"] in {"StatefulSet", "Deployment"}:
        if not matches(spec["selector"], spec["template"]["metadata"]["labels"]):
            yield f"{name}: its own selector"
        if thing["kind"] == "StatefulSet" and not find(things, "Service", spec["serviceName"]):
            yield f"{name}: Service {spec['serviceName']}"
    if thing["kind"] == "Ingress":
        for backend in (path["backend"]["service"] for rule in spec["rules"] for path in rule["http"]["paths"]):
            services = find(things, "Service", backend["name"])
            if backend["port"]["name"] not in {
                port["name"] for service in services for port in service["spec"]["ports"]
            }:
                yield f"{name}: Service {backend}"
    if thing["kind"] == "RayService":
        secret = spec["rayClusterConfig"]["gcsFaultToleranceOptions"].get("redisPassword")
        if secret and secret["valueFrom"]["secretKeyRef"]["name"] not in documented():
            yield f"{name}: Secret of gcsFaultToleranceOptions"


def _hosts(things: list[Thing]) -> Iterator[str]:
    """Yield names of our Services in settings, arguments and addresses, with ports and namespaces."""
    services = {service["metadata"]["name"]: service["spec"]["ports"] for service in find(things, "Service")}
    spaces = {thing["metadata"].get("namespace") for thing in things}
    texts = [
        str(config_map.get("data", {}).get(key))
        for config_map in find(things, "ConfigMap")
        for key in config_map.get("data", {})
        if key.isupper() or key == "server.properties"
    ]
    texts += [
        word
        for pod in pods(things)
        for container in pod.containers()
        for word in (
            *container.get("command", ()),
            *container.get("args", ()),
            *environment(things, container).values(),
        )
    ]
    texts += [
        ray_service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
        for ray_service in find(things, "RayService")
    ]
    for text in (with_namespace(things, text) for text in texts):
        for name, space, port in _HOST.findall(text):
            if name not in services:
                yield f"Service {name} in {text!r}"
            elif port and int(port) not in {service_port["port"] for service_port in services[name]}:
                yield f"port {port} of Service {name} in {text!r}"
            if space and space not in spaces | _FOREIGN:
                yield f"namespace {space} in {text!r}"


def setting(things: list[Thing], name: str) -> Any:
    """Return a setting of the rendering's ConfigMap; None without it."""
    (settings,) = [
        config_map
        for config_map in find(things, "ConfigMap")
        if config_map["metadata"]["name"].startswith("tailrace-settings")
    ]
    return settings["data"].get(name)
