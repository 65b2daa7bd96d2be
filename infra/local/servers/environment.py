"""Environment variables of the stack's processes."""

from pathlib import Path

from infra.local.supervisor.stackfile import MARK
from services.settings.settings import Settings, inherited_environment


def part_environment(settings: Settings) -> dict[str, str]:
    return {
        **inherited_environment(),
        **settings.as_environment(),
        "TAILRACE_ARRIVALS_DIR": str(settings.state_dir / "run" / "arrivals"),
        MARK: str(settings.state_dir),
        "PYTHONUNBUFFERED": "1",
    }


def metrics_environment(settings: Settings) -> dict[str, str]:
    """Return the variable that makes a process share its metrics; prometheus-client reads it at import."""
    return {"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_dir)}


def gateway_log(settings: Settings) -> Path:
    """Return the log file that all gateways and engines share, inside and outside Ray."""
    return settings.log_file or settings.state_dir / "logs" / "gateway.log"


def log_environment(settings: Settings) -> dict[str, str]:
    """Return the variable that names the log file to a process."""
    return {"TAILRACE_LOG_FILE": str(gateway_log(settings))}
