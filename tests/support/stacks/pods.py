"""Pods of rendered manifests as containers of one Docker network, where Services are names: no cluster is needed.

Image, command, arguments, environment, user, read-only root, volumes and probes are the manifest's. Not there: network
policies, the scheduler, and KubeRay, whose pods have no command.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from infra.local.supervisor.probes import accepts
from tests.support.manifests import Pod, Thing, environment, find, matches, pod_of, pods, the, with_namespace
from tests.support.stacks.compose_stack import docker, why_not
from tests.support.wait import wait_for

_NO_STARTUP_PROBE_S = 120.0


class Pods:
    """Pods of these objects, in a network of their own.

    Args:
        things: The rendered objects.
        folder: An empty folder for the volumes, one below it for each claim.
        secrets: Files by name of the Secret, as `kubectl create secret` gets them.
        network: Name of the network; it is removed at the end.
    """

    def __init__(
        self, things: list[Thing], folder: Path, secrets: Mapping[str, Mapping[str, str]], network: str
    ) -> None:
        self._things = things
        self._folder = folder
        self._secrets = dict(secrets)
        self._network = network
        self._containers: dict[str, str] = {}
        docker("network", "create", network)

    def close(self) -> None:
        """Remove all containers and the network."""
        for container in self._containers.values():
            subprocess.run(["docker", "rm", "--force", "--volumes", container], capture_output=True, check=False)
        docker("network", "rm", self._network)

    def start(self, *names: str) -> None:
        """Start each pod, and wait until its probes succeed, before the next."""
        for name in names:
            pod = pod_of(self._things, name)
            for init in (init for init in pod.spec.get("initContainers", ()) if init.get("restartPolicy") != "Always"):
                docker("run", "--rm", "--network", self._network, *self._options(pod, init))
            for container in self._long_running(pod):
                network = self._shared_network(pod) or ["--network", self._network, *self._aliases(pod)]
                self._containers[f"{name}/{container['name']}"] = docker(
                    "run", "--detach", *network, *self._options(pod, container)
                ).strip()
            self.until_ready(name)

    def until_ready(self, name: str) -> None:
        """Wait as long as the startup probe does; then each readiness and liveness probe must succeed."""
        pod = pod_of(self._things, name)
        for container in self._long_running(pod):
            first = container.get("startupProbe", {})
            limit = first.get("failureThreshold", 0) * first.get("periodSeconds", 10) or _NO_STARTUP_PROBE_S
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                try:
                    wait_for(lambda container=container, kind=kind: self._answers(pod, container, kind), limit, kind)
                except AssertionError as error:
                    error.add_note(f"{name}/{container['name']} wrote {self.log(name)[-3_000:]}")
                    raise

    def is_ready(self, name: str) -> bool:
        """Whether each container runs and its readiness probe succeeds."""
        pod = pod_of(self._things, name)
        return all(self._answers(pod, container, "readinessProbe") for container in self._long_running(pod))

    def run(self, name: str, *command: str) -> str:
        """Run a job's pod to its end with this command, as `kubectl create job --from` with a patch; return its output.

        Raises AssertionError with its errors.
        """
        pod = pod_of(self._things, name)
        (container,) = pod.spec["containers"]
        changed = {**container, "command": [*command], "args": []}
        return docker("run", "--rm", "--network", self._network, *self._options(pod, changed))

    def update_secret(self, name: str, files: Mapping[str, str]) -> None:
        """Replace a Secret, whose files change in the pods that mount it."""
        self._secrets[name] = files
        for pod in (pod_of(self._things, name) for name in {key.partition("/")[0] for key in self._containers}):
            for volume in pod.spec.get("volumes", ()):
                self._source(pod, volume["name"])

    def kill(self, name: str) -> None:
        """SIGKILL the pod's containers; nothing restarts them."""
        for container in self._long_running(pod_of(self._things, name)):
            docker("kill", self._containers[f"{name}/{container['name']}"])

    def log(self, name: str) -> str:
        """Return what the pod's containers have written."""
        ids = [container_id for key, container_id in self._containers.items() if key.partition("/")[0] == name]
        done = [
            subprocess.run(["docker", "logs", container_id], capture_output=True, text=True, check=False)
            for container_id in ids
        ]
        return "".join(log.stdout + log.stderr for log in done)

    def url(self, service: str, port: str) -> str:
        """Return the HTTP address behind the port of a Service that selects a single pod."""
        spec = the(self._things, "Service", service)["spec"]
        (pod,) = [pod for pod in pods(self._things) if matches({"matchLabels": spec["selector"]}, pod.labels)]
        (wanted,) = [candidate for candidate in spec["ports"] if candidate["name"] == port]
        return f"http://{self._address(pod)}:{wanted['port']}"

    def claim(self, name: str) -> Path:
        """Return the folder of a PersistentVolumeClaim."""
        return _opened(self._folder / name)

    def _long_running(self, pod: Pod) -> list[Thing]:
        sidecars = [
            sidecar for sidecar in pod.spec.get("initContainers", ()) if sidecar.get("restartPolicy") == "Always"
        ]
        return [*pod.spec["containers"], *sidecars]

    def _shared_network(self, pod: Pod) -> list[str]:
        first = self._containers.get(f"{pod.name}/{pod.spec['containers'][0]['name']}")
        return [] if first is None else ["--network", f"container:{first}"]

    def _aliases(self, pod: Pod) -> Iterator[str]:
        """Yield the names of the Services that select the pod, whose ports must be its containers' own."""
        ports = {port["name"]: port["containerPort"] for own in pod.containers() for port in own.get("ports", ())}
        for service in find(self._things, "Service"):
            spec, metadata = service["spec"], service["metadata"]
            if matches({"matchLabels": spec["selector"]}, pod.labels):
                assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"]), metadata["name"]
                name, namespace = metadata["name"], metadata["namespace"]
                for alias in ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local"):
                    yield from ("--network-alias", f"{name}{alias}")

    def _options(self, pod: Pod, container: Thing) -> Iterator[str]:
        """Yield the words of `docker run` from the first option to the last argument."""
        security = {**pod.spec.get("securityContext", {}), **container.get("securityContext", {})}
        yield from ("--user", f"{security['runAsUser']}:{security['runAsGroup']}")
        yield from ("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
        yield from ("--read-only",) if security["readOnlyRootFilesystem"] else ()
        if limit := container.get("resources", {}).get("limits", {}).get("memory"):
            yield from ("--memory", limit.lower().removesuffix("i"))
        for key, value in environment(self._things, container).items():
            yield from ("--env", f"{key}={value}")
        for mount in container.get("volumeMounts", ()):
            source = self._source(pod, mount["name"]) / mount.get("subPath", "")
            mode = "ro" if mount.get("readOnly") else "rw"
            yield from ("--volume", f"{_opened(source)}:{mount['mountPath']}:{mode}")
        command = [*container.get("command", ())]
        yield from ("--entrypoint", command[0]) if command else ()
        yield container["image"]
        yield from (with_namespace(self._things, word) for word in (*command[1:], *container.get("args", ())))

    def _source(self, pod: Pod, name: str) -> Path:
        """Return the folder of a pod's volume, with the files of its ConfigMaps and Secrets."""
        if name in pod.claims:
            return self.claim(f"{name}-{pod.name}")
        (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == name]
        if claim := volume.get("persistentVolumeClaim"):
            return self.claim(claim["claimName"])
        folder = _opened(self._folder / "pods" / pod.name / name)
        for source in volume.get("projected", {}).get("sources", [volume]):
            for path, text in self._files(source):
                scratch = _opened((folder / path).parent) / f".{Path(path).name}"
                scratch.write_text(text)
                scratch.chmod(0o644)
                scratch.replace(folder / path)
        return folder

    def _files(self, source: Thing) -> Iterator[tuple[str, str]]:
        """Yield the files of a Secret or ConfigMap, by path. Raises KeyError for a missing one that is not optional."""
        if (secret := source.get("secret")) is not None:
            name = secret.get("name") or secret["secretName"]
            given = self._secrets.get(name, {} if secret.get("optional") else None)
        elif (secret := source.get("configMap")) is not None:
            (config_map,) = find(self._things, "ConfigMap", secret["name"]) or [{} if secret.get("optional") else None]
            given = None if config_map is None else config_map.get("data", {})
        else:
            return
        if given is None:
            raise KeyError(f"{secret}: no such object")
        items = secret.get("items") or [{"key": key, "path": key} for key in given]
        yield from ((item["path"], given[item["key"]]) for item in items if item["key"] in given)

    def _answers(self, pod: Pod, container: Thing, kind: str) -> bool:
        """Run a probe once; a container without it is ready while it runs."""
        own = self._containers[f"{pod.name}/{container['name']}"]
        assert json.loads(docker("inspect", own))[0]["State"]["Running"], (
            f"{pod.name} ended: {self.log(pod.name)[-3_000:]}"
        )
        probe = container.get(kind, {})
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        timeout_s = probe.get("timeoutSeconds", 1)
        if get := probe.get("httpGet"):
            return _is_ok(f"http://{self._address(pod)}:{ports[get['port']]}{get['path']}", timeout_s)
        if tcp := probe.get("tcpSocket"):
            return accepts(self._address(pod), ports[tcp["port"]])
        if command := probe.get("exec"):
            call: list[str] = ["docker", "exec", own, *command["command"]]
            return subprocess.run(call, capture_output=True, check=False).returncode == 0
        return True

    def _address(self, pod: Pod) -> str:
        first: Any = json.loads(docker("inspect", self._containers[f"{pod.name}/{pod.spec['containers'][0]['name']}"]))
        return str(first[0]["NetworkSettings"]["Networks"][self._network]["IPAddress"])


def why_no_pods(images: Iterator[str] | list[str]) -> str | None:
    """Return why these images cannot run here, with the fix; None if they can."""
    if shutil.which("docker") is None:
        return "no Docker: install it, and start its engine"
    for image in images:
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode:
            fix = "build it as docs/compose.md says and tag it so" if image.startswith("tailrace") else "pull it"
            return f"no image {image}: {fix}"
    return why_not()


def _is_ok(url: str, timeout_s: float) -> bool:
    try:
        return httpx.get(url, timeout=timeout_s).status_code < httpx.codes.BAD_REQUEST
    except httpx.TransportError:
        return False


def _opened(folder: Path) -> Path:
    """Make a folder that every user may write, as `fsGroup` lets the pod's."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    return folder
