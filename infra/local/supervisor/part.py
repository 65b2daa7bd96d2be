"""The description of one supervised process."""

from dataclasses import dataclass, field
from pathlib import Path

from infra.local.supervisor.lifecycle import RestartPolicy
from infra.local.supervisor.ports import Port
from infra.local.supervisor.probes import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One supervised process.

    The part is healthy when all `probes` succeed; without probes, while it lives. `grace_s` is the time between SIGTERM
    and SIGKILL. `needs` names parts that must be healthy before the first start. `heartbeat` is the file that the part
    touches while it works; the file of a dead process is removed before the next start.
    """

    name: str
    command: tuple[str, ...]
    ports: tuple[Port, ...] = ()
    probes: tuple[Probe, ...] = ()
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    grace_s: float = 5.0
    heartbeat: Path | None = None

    def is_healthy(self) -> bool:
        return all(probe() for probe in self.probes)
