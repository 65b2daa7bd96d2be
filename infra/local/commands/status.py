"""`tailrace status`: what the record says, checked against the processes and the servers themselves."""

from dataclasses import dataclass

import psutil

from infra.local.supervisor.keeper import children_of
from infra.local.supervisor.parts import Part, stack_parts
from infra.local.supervisor.stackfile import PartRecord, StackFile
from services.observability.metrics import render_metrics
from services.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHealth:
    """One part as it is now. `health` is well, no answer, or down; memory counts the part's whole process tree."""

    name: str
    addresses: tuple[str, ...]
    health: str
    pid: int | None
    num_restarts: int
    memory_mb: float

    @property
    def is_well(self) -> bool:
        """Whether it answers."""
        return self.health == "well"


def inspect_stack(settings: Settings) -> list[PartHealth]:
    """Ask every part of this state folder's stack. Empty when no stack runs here."""
    stack_file = StackFile(settings.state_dir)
    record = stack_file.read()
    if record is None or not stack_file.is_claimed():
        return []
    nothing = PartRecord(phase="down", keeper_pid=None, num_restarts=0)
    parts = [_inspect(part, record.parts.get(part.name, nothing)) for part in stack_parts(settings)]
    return [*parts, *text_health(settings)]


def text_health(settings: Settings) -> list[PartHealth]:
    """Tell of the text that serve writes, by the metrics of whoever writes it here."""
    writes = settings.metrics_dir.is_dir() and b'part="text"' in render_metrics(settings.metrics_dir)
    if not (writes or settings.text_path):
        return []
    address = f"{settings.http_host}:{settings.http_port}/v1"
    return [
        PartHealth(
            name="text",
            addresses=(address,),
            health="well" if writes else "down",
            pid=None,
            num_restarts=0,
            memory_mb=0.0,
        )
    ]


def _inspect(part: Part, record: PartRecord) -> PartHealth:
    pids = children_of(record.keeper_pid) if record.keeper_pid else []
    health = "down" if not pids else "well" if part.is_well() else "no answer"
    return PartHealth(
        name=part.name,
        addresses=tuple(f"{port.host}:{port.number}" for port in part.ports),
        health=health,
        pid=pids[0] if pids else None,
        num_restarts=record.num_restarts,
        memory_mb=sum(_tree_memory_mb(pid) for pid in pids),
    )


def _tree_memory_mb(pid: int) -> float:
    """Resident memory of a process and all below it; shared pages count once per process."""
    try:
        process = psutil.Process(pid)
        return float(sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 2**20)
    except psutil.Error:
        return 0.0
