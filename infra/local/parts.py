"""The parts of the embedded stack, in starting order: the command of each, its ports, its needs and its health probes.

    valkey ┐
    broker ┼─▶ worker, release, standby, serve ◀── edge        metrics: independent
    stop: edge, standby, serve, worker, release, broker, valkey, metrics

Derived only from settings; starts nothing.
"""

import sys
from functools import partial
from itertools import combinations

from infra.local.binaries import tansu_command, valkey_command
from infra.local.edge.admin import edge_answers
from infra.local.edge.config import edge_folder
from infra.local.servers.access import valkey_access_file
from infra.local.servers.environment import log_environment, metrics_environment
from infra.local.supervisor.lifecycle import RestartPolicy
from infra.local.supervisor.part import Part
from infra.local.supervisor.ports import Port
from infra.local.supervisor.probes import accepts, answers_http, answers_kafka, answers_redis, beats
from services.errors import ConfigError
from services.settings.settings import Settings


def valkey_part(settings: Settings) -> Part:
    """Return the feature store; its data outlives the stack."""
    host, port = settings.redis_host, settings.redis_port
    access = valkey_access_file(settings) if settings.redis_password_file else None
    return Part(
        name="valkey",
        command=tuple(valkey_command(port, settings.state_dir / "valkey", host, access)),
        ports=(Port(host, port, "TAILRACE_REDIS_PORT", "TAILRACE_REDIS_HOST"),),
        probes=(partial(answers_redis, host, port),),
    )


def broker_part(settings: Settings) -> Part:
    """Return the broker, which keeps the event log in memory."""
    if settings.kafka_address.security_protocol != "PLAINTEXT":
        raise ConfigError("TAILRACE_KAFKA_*: the embedded broker takes no password and no TLS; unset them here")
    host, port = broker_address(settings.kafka_bootstrap)
    return Part(
        name="broker",
        command=tuple(tansu_command(port, host)),
        ports=(Port(host, port, "TAILRACE_KAFKA_BOOTSTRAP", "TAILRACE_KAFKA_BOOTSTRAP"),),
        probes=(partial(answers_kafka, host, port),),
        grace_s=1.0,
    )


def worker_part(settings: Settings) -> Part:
    return Part(
        name="worker",
        command=_python("services.stream"),
        probes=(partial(beats, settings.worker_heartbeat),),
        heartbeat=settings.worker_heartbeat,
        needs=("valkey", "broker"),
        environment={"OMP_NUM_THREADS": "1", **metrics_environment(settings)},
        restart_policy=RestartPolicy(start_timeout_s=180.0),
    )


def release_part(settings: Settings) -> Part:
    """Return the canary analysis of releases: it compares a canary's users with all other users."""
    return Part(
        name="release",
        command=_python("pipelines.release"),
        probes=(partial(beats, settings.release_heartbeat),),
        heartbeat=settings.release_heartbeat,
        needs=("broker",),
        environment={"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", **metrics_environment(settings)},
        restart_policy=RestartPolicy(start_timeout_s=60.0),
    )


def standby_part(settings: Settings) -> Part:
    """Return the gateway outside Ray, which answers while Ray's ingress is unavailable."""
    host, http_port, grpc_port = settings.inner_host, settings.standby_http_port, settings.standby_grpc_port
    return Part(
        name="standby",
        command=_python("infra.local.standby"),
        ports=_inner_ports(host, http_port, grpc_port, "TAILRACE_STANDBY"),
        probes=(partial(answers_http, host, http_port, "/healthz"), partial(accepts, host, grpc_port)),
        needs=("valkey", "broker"),
        restart_policy=RestartPolicy(start_timeout_s=180.0, unhealthy_timeout_s=180.0),
        environment={"OMP_NUM_THREADS": "1", **metrics_environment(settings), **log_environment(settings)},
    )


def serve_part(settings: Settings) -> Part:
    """Return Ray Serve with the gateways.

    It is killed after a last log line, because acknowledged events are already in the broker.
    """
    host, http_port, grpc_port = settings.inner_host, settings.inner_http_port, settings.inner_grpc_port
    return Part(
        name="serve",
        command=_python("infra.local.servers.serve"),
        ports=_inner_ports(host, http_port, grpc_port, "TAILRACE_INNER"),
        probes=(
            partial(answers_http, host, http_port, "/-/healthz"),
            partial(answers_http, host, http_port, "/healthz"),
            partial(accepts, host, grpc_port),
        ),
        needs=("valkey", "broker"),
        restart_policy=RestartPolicy(start_timeout_s=180.0, unhealthy_timeout_s=45.0),
        environment=log_environment(settings),
        grace_s=1.0,
    )


def _inner_ports(host: str, http_port: int, grpc_port: int, prefix: str) -> tuple[Port, Port]:
    return (
        Port(host, http_port, f"{prefix}_HTTP_PORT", "TAILRACE_INNER_HOST"),
        Port(host, grpc_port, f"{prefix}_GRPC_PORT", "TAILRACE_INNER_HOST"),
    )


def metrics_part(settings: Settings) -> Part:
    """Return the endpoint that Prometheus scrapes."""
    host, port = settings.http_host, settings.metrics_port
    return Part(
        name="metrics",
        command=_python("infra.local.servers.metrics"),
        ports=(Port(host, port, "TAILRACE_METRICS_PORT"),),
        probes=(partial(answers_http, host, port, "/healthz"),),
        grace_s=1.0,
    )


def edge_part(settings: Settings) -> Part:
    """Return HAProxy at both doors' public ports."""
    host, folder = settings.http_host, edge_folder(settings.state_dir)
    return Part(
        name="edge",
        command=_python("infra.local.edge"),
        ports=(
            Port(host, settings.http_port, "TAILRACE_HTTP_PORT"),
            Port(host, settings.grpc_port, "TAILRACE_GRPC_PORT"),
        ),
        probes=(partial(edge_answers, folder),),
        environment=metrics_environment(settings),
        grace_s=8.0,
    )


def stack_parts(settings: Settings) -> tuple[Part, ...]:
    """Return the parts in starting order. Raises EnvironmentFault for a missing binary, ConfigError for equal ports."""
    parts = (
        valkey_part(settings),
        broker_part(settings),
        metrics_part(settings),
        worker_part(settings),
        release_part(settings),
        *((standby_part(settings),) if settings.standby else ()),
        serve_part(settings),
        edge_part(settings),
    )
    _check_apart([port for part in parts for port in part.ports])
    return parts


def _check_apart(ports: list[Port]) -> None:
    """Raise ConfigError with a line for each two parts with the same port."""
    if faults := [
        f"{other.setting}: {other.number} is already the port of {port.setting}; give each its own port"
        for port, other in combinations(ports, 2)
        if port.meets(other)
    ]:
        raise ConfigError("\n".join(faults))


def broker_address(bootstrap: str) -> tuple[str, int]:
    """Split `host:port`. Raises ConfigError when it is anything else, such as a list of brokers."""
    host, _, port = bootstrap.rpartition(":")
    if not host or "," in host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"TAILRACE_KAFKA_BOOTSTRAP: the embedded broker needs one host:port, got {bootstrap!r}")
    return host, int(port)


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)
