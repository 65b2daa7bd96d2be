"""The TLS edge: HAProxy in front of both doors, until killed. `python -m infra.local.edge [--to-host HOST]`.

Ray Serve's own ingress speaks no TLS. Follows tls.crt, tls.key and the client CA, and swaps them in when they change. Works
beside the doors (the embedded stack, a sidecar) or apart from them, as a container of its own with `--to-host`. HAProxy
comes in a wheel.
"""

import argparse
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import structlog

from infra.local.edge.admin import swap_certificates
from infra.local.edge.config import EdgePlan, Way, check_files, edge_folder
from infra.local.servers.binaries import haproxy_command
from services.errors import ConfigError
from services.gateway.access.file_stamp import Stamp, stamp_of
from services.observability.metrics import configure_logging
from services.settings.settings import Settings, load_settings

log = structlog.get_logger()

POLL_S = 1.0
STOP_S = 6.0


def edge_plan(settings: Settings, to_host: str, to_http_port: int, to_grpc_port: int) -> EdgePlan:
    """Plan the edge. Raises ConfigError when there is no certificate to show."""
    if settings.tls_dir is None:
        raise ConfigError("TAILRACE_TLS_DIR: not set; the edge needs a folder with tls.crt and tls.key")
    check_files(settings.tls_dir, settings.tls_client_ca_file)
    return EdgePlan(
        rest=Way(settings.http_host, settings.http_port, to_host, to_http_port),
        grpc=Way(settings.http_host, settings.grpc_port, to_host, to_grpc_port),
        tls_dir=settings.tls_dir,
        client_ca_file=settings.tls_client_ca_file,
    )


def run_edge(plan: EdgePlan, folder: Path) -> int:
    """Run HAProxy and follow the certificates until it ends or SIGTERM comes. Gives HAProxy's exit code."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "haproxy.cfg").write_text(plan.render())
    stamps = _stamps(plan)
    child = subprocess.Popen(haproxy_command(folder / "haproxy.cfg"), cwd=folder)
    signal.signal(signal.SIGTERM, _leave)
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            if (seen := _stamps(plan)) != stamps:
                stamps = seen
                _swap(plan, folder)
    finally:
        _stop(child)
    return child.returncode


def _swap(plan: EdgePlan, folder: Path) -> None:
    """Swap, or say why not; a half-written pair is tried again when its other half has changed."""
    try:
        swap_certificates(folder, plan)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        log.error("certificates_refused", error=str(error))  # noqa: TRY400 - no bug of ours
    else:
        log.info("certificates_swapped", certificate=str(plan.certificate))


def _stamps(plan: EdgePlan) -> tuple[Stamp | None, ...]:
    """Tell one state of the files from another."""
    paths = (plan.certificate, plan.key, plan.client_ca_file)
    return tuple(None if path is None else stamp_of(path) for path in paths)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """Let HAProxy finish what it answers, for a few seconds."""
    if child.poll() is None:
        child.send_signal(signal.SIGUSR1)
        try:
            child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """Read settings and run."""
    settings = load_settings()
    parser = argparse.ArgumentParser(prog="python -m infra.local.edge", description=__doc__.partition("\n")[0])
    parser.add_argument("--to-host", default="127.0.0.1", metavar="HOST", help="where the doors are")
    parser.add_argument("--to-http-port", type=int, default=settings.inner_http_port, metavar="PORT")
    parser.add_argument("--to-grpc-port", type=int, default=settings.inner_grpc_port, metavar="PORT")
    to = parser.parse_args()
    configure_logging(settings.log_level)
    plan = edge_plan(settings, to.to_host, to.to_http_port, to.to_grpc_port)
    raise SystemExit(run_edge(plan, edge_folder(settings.state_dir)))


if __name__ == "__main__":
    main()
