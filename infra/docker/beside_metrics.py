"""Run a role's process beside the endpoint that Prometheus scrapes; both end together.

The role is a child with `PROMETHEUS_MULTIPROC_DIR` set before its Python starts; the endpoint is a thread of this process.
When the child ends, so does the container, and the container engine's restart policy applies.
"""

import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from types import FrameType

from infra.local.servers.metrics import metrics_server
from infra.local.supervisor.parts import metrics_environment
from services.settings.settings import Settings, inherited_environment

EVERYWHERE = "0.0.0.0"  # noqa: S104 - inside the container; no port of the metrics is published


def run_beside_metrics(command: tuple[str, ...], environment: Mapping[str, str], settings: Settings) -> int:
    """Run the command to its end and return its exit code; SIGTERM and SIGINT are forwarded. Empties the metrics folder."""
    shutil.rmtree(settings.metrics_dir, ignore_errors=True)
    settings.metrics_dir.mkdir(parents=True)
    endpoint = metrics_server(EVERYWHERE, settings.metrics_port, settings.metrics_dir)
    thread = threading.Thread(target=endpoint.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        return _run({**inherited_environment(), **metrics_environment(settings), **environment}, command)
    finally:
        endpoint.shutdown()
        thread.join()
        endpoint.server_close()


def _run(environment: Mapping[str, str], command: tuple[str, ...]) -> int:
    child = subprocess.Popen(command, env=environment)

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
