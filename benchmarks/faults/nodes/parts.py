"""The parts of a cluster of several nodes, with the environment and the Serve configuration of the `prod` overlay.

    front: valkey, control-store (Ray's), broker, standby, edge      head: Ray's control plane, no replica
    each worker node: Ray with one gateway and one LLM replica, and a stream worker

Derived from settings and the layout; starts nothing.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.nodes.layout import FRONT, HEAD, Layout
from infra.local.binaries import valkey_command
from infra.local.parts import broker_part, edge_part, standby_part, valkey_part
from infra.local.servers.node import node_environment
from infra.local.supervisor.lifecycle import RestartPolicy
from infra.local.supervisor.part import Part
from infra.local.supervisor.probes import Probe, accepts, answers_http, answers_redis, beats
from services.settings.settings import Settings

_ALL = "0.0.0.0"  # noqa: S104 - of the node's own namespace
_NO_PASSWORD = ("--protected-mode", "no")
"""The stores accept connections only from these namespaces."""
CONTROL_PORT, DASHBOARD_PORT, AGENT_PORT, CONTROL_STORE_PORT = 6379, 8265, 52365, 6380
OBJECT_STORE_BYTES = 100 * 2**20
SLOTS = 2
"""CPUs that each worker node offers to Ray: one for its gateway, one for its LLM replica, on any machine."""
_FORGET = ("sh", "-c", 'rm -f "$1" && shift && exec "$@"', "sh")
"""Ray's head refuses to start if it finds its address here and in another process; all nodes share this machine."""
_PATIENT = RestartPolicy(start_timeout_s=300.0, unhealthy_timeout_s=600.0)
"""A node whose network is cut is unhealthy but alive; it must not be killed for that."""


def cluster_settings(layout: Layout, state_dir: Path, **given: Any) -> Settings:
    """Return the settings of the front's parts: the public doors, the stores and the standby are all at its address."""
    front = layout.address(FRONT)
    return Settings(
        state_dir=state_dir,
        http_host=front,
        inner_host=front,
        redis_host=front,
        kafka_bootstrap=f"{front}:9092",
        api_keys_file=state_dir / "keys.json",
        num_workers=len(layout.workers),
        gateway_replicas=len(layout.workers),
        llm_replicas=len(layout.workers),
        llm_routing="always",
        **given,
    )


def node_settings(layout: Layout, settings: Settings) -> Settings:
    """Return the settings of a node's processes: the front's, with the node's own folder."""
    return settings.model_copy(update={"state_dir": layout.seen_as, "inner_host": _ALL})


def cluster_environment(layout: Layout, settings: Settings, token_file: Path) -> dict[str, str]:
    """Return the variables of every process on a node."""
    own = node_settings(layout, settings)
    ray = node_environment(own, settings.inner_host, token_file)
    return {**ray, **own.as_environment(), "HOME": str(layout.seen_as)}


def store_parts(settings: Settings) -> tuple[Part, ...]:
    """Return the features' store, the broker, and the store of Ray's control plane."""
    features, host = valkey_part(settings), settings.redis_host
    folder = settings.state_dir / "control-store"
    control = Part(
        name="control-store",
        command=(*valkey_command(CONTROL_STORE_PORT, folder, host), *_NO_PASSWORD),
        probes=(partial(answers_redis, host, CONTROL_STORE_PORT),),
    )
    return (replace(features, command=(*features.command, *_NO_PASSWORD)), control, broker_part(settings))


def topics_part() -> Part:
    """Return the command that makes missing topics, which ends by itself."""
    return Part(name="topics", command=(sys.executable, "-m", "infra.kafka.topics"))


def serve_part(layout: Layout, environment: dict[str, str], config: Path) -> Part:
    """Return the command that deploys the application, which ends by itself."""
    address = f"http://{layout.address(HEAD)}:{DASHBOARD_PORT}"
    command = (_script("serve"), "deploy", "--address", address, str(config))
    return Part(name="deploy", command=layout.inside(HEAD, command), environment=environment)


def cluster_parts(layout: Layout, settings: Settings, environment: dict[str, str]) -> tuple[Part, ...]:
    """Return all parts except the stores, in starting order."""
    return (
        _head_part(layout, settings, environment),
        *(_node_part(layout, node, environment) for node in layout.workers),
        *(_worker_part(layout, index, settings, environment) for index in range(len(layout.workers))),
        standby_part(settings),
        _edge_part(layout, settings),
    )


def _head_part(layout: Layout, settings: Settings, environment: dict[str, str]) -> Part:
    host = layout.address(HEAD)
    command = (
        *("--head", f"--port={CONTROL_PORT}", "--num-cpus=0"),
        *("--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD_PORT}"),
    )
    start = _ray_start(layout, host, *command)
    store = {
        "RAY_REDIS_ADDRESS": f"{settings.redis_host}:{CONTROL_STORE_PORT}",
        "RAY_external_storage_namespace": layout.name,
    }
    return Part(
        name=HEAD,
        command=layout.inside(HEAD, (*_FORGET, str(layout.seen_as / "r/ray_current_cluster"), *start)),
        probes=(partial(answers_http, host, DASHBOARD_PORT, "/api/gcs_healthz"),),
        environment={**environment, **store},
        needs=("control-store",),
        restart_policy=_PATIENT,
        grace_s=0.0,
    )


def _node_part(layout: Layout, node: str, environment: dict[str, str]) -> Part:
    host = layout.address(node)
    command = (f"--address={layout.address(HEAD)}:{CONTROL_PORT}", f"--num-cpus={SLOTS}")
    return Part(
        name=node,
        command=layout.inside(node, _ray_start(layout, host, *command)),
        probes=(partial(answers_http, host, AGENT_PORT, "/api/local_raylet_healthz"),),
        environment=environment,
        needs=(HEAD,),
        restart_policy=_PATIENT,
        grace_s=0.0,
    )


def _ray_start(layout: Layout, host: str, *options: str) -> tuple[str, ...]:
    return (
        *(_script("ray"), "start", "--block", "--disable-usage-stats", f"--node-ip-address={host}"),
        *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={layout.seen_as / 'r'}"),
        *("--min-worker-port=10002", "--max-worker-port=17999", *options),
    )


def _worker_part(layout: Layout, index: int, settings: Settings, environment: dict[str, str]) -> Part:
    node = layout.workers[index]
    return Part(
        name=f"worker-{index}",
        command=layout.inside(node, (sys.executable, "-m", "services.stream")),
        probes=(partial(beats, layout.folder_of(node) / "run" / f"worker-{index}.beat"),),
        heartbeat=layout.folder_of(node) / "run" / f"worker-{index}.beat",
        needs=("valkey", "broker"),
        environment={
            **environment,
            "TAILRACE_WORKER_INDEX": str(index),
            "PROMETHEUS_MULTIPROC_DIR": str(layout.seen_as / "run/metrics"),
        },
        restart_policy=RestartPolicy(start_timeout_s=180.0, unhealthy_timeout_s=600.0),
    )


def _edge_part(layout: Layout, settings: Settings) -> Part:
    part = edge_part(settings)
    hosts = [word for node in layout.workers for word in ("--ray-host", layout.address(node))]
    probes: tuple[Probe, ...] = (*part.probes, partial(accepts, settings.http_host, settings.http_port))
    return replace(part, command=(*part.command, *hosts, "--standby-host", settings.inner_host), probes=probes)


def _script(name: str) -> str:
    return str(Path(sys.executable).parent / name)
