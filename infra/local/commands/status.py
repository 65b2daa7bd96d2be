"""`tailrace status`: the record of the stack, checked against its processes and by its health probes."""

import json
from contextlib import suppress
from dataclasses import dataclass

import psutil

from infra.local.commands.first_training import TRAINING_PART
from infra.local.parts import stack_parts
from infra.local.supervisor.lifecycle import Phase
from infra.local.supervisor.part import Part
from infra.local.supervisor.probes import http_answer
from infra.local.supervisor.processes import process_tree
from infra.local.supervisor.stackfile import PartRecord, StackFile
from services.observability.node_metrics import render_metrics
from services.settings.settings import Settings

_NO_MORE_STARTS = ("ready", "untrained", "stopping", "store")
"""Stages that add no part to the stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHealth:
    """The current state of a part. `health` is healthy, starting, unavailable or down.

    Memory is for its whole process tree.
    """

    name: str
    addresses: tuple[str, ...]
    health: str
    pid: int | None
    num_restarts: int
    memory_mb: float

    @property
    def is_healthy(self) -> bool:
        return self.health == "healthy"


def inspect_stack(settings: Settings) -> list[PartHealth]:
    """Return the health of every part of this state folder's stack, empty if none runs."""
    stack_file = StackFile(settings.state_dir)
    record = stack_file.read()
    if record is None or not stack_file.is_claimed():
        return []
    phase = "down" if record.stage in _NO_MORE_STARTS else Phase.WAITING
    nothing = PartRecord(phase=phase, keeper_pid=None, num_restarts=0)
    parts = [_inspect(part, record.parts.get(part.name, nothing)) for part in stack_parts(settings)]
    return [*parts, *text_health(settings)]


def is_training(settings: Settings) -> bool:
    """Return whether the first training of this state folder's stack runs."""
    record = StackFile(settings.state_dir).read()
    return record is not None and TRAINING_PART in record.parts


def readiness(settings: Settings) -> str:
    """Return the readiness that a gateway reports, with its degraded modes; "" without an answer."""
    status, body = http_answer(settings.inner_host, settings.inner_http_port, "/readyz")
    try:
        return str(json.loads(body)["status"]) if status else ""
    except (ValueError, LookupError, TypeError):
        return ""


def text_health(settings: Settings) -> list[PartHealth]:
    """Return the health of text generation, which runs inside serve, from its metrics; empty if disabled."""
    is_up = settings.metrics_dir.is_dir() and b'part="text"' in render_metrics(settings.metrics_dir)
    if not (is_up or settings.text_path):
        return []
    address = f"{settings.http_host}:{settings.http_port}/v1"
    return [
        PartHealth(
            name="text",
            addresses=(address,),
            health="healthy" if is_up else "down",
            pid=None,
            num_restarts=0,
            memory_mb=0.0,
        )
    ]


def _inspect(part: Part, record: PartRecord) -> PartHealth:
    tree = process_tree(record)
    return PartHealth(
        name=part.name,
        addresses=tuple(f"{port.host}:{port.number}" for port in part.ports),
        health=_health(part, record, is_running=bool(tree)),
        pid=tree[0].pid if tree else None,
        num_restarts=record.num_restarts,
        memory_mb=sum(map(_memory_mb, tree)),
    )


def _health(part: Part, record: PartRecord, *, is_running: bool) -> str:
    if is_running and part.is_healthy():
        return "healthy"
    if record.phase in (Phase.WAITING, Phase.STARTING):
        return "starting"
    return "unavailable" if is_running else "down"


def _memory_mb(process: psutil.Process) -> float:
    """Return the resident memory, including shared pages; 0 if the process has ended."""
    with suppress(psutil.Error):
        return float(process.memory_info().rss / 2**20)
    return 0.0
