"""Run the edge: `python -m infra.local.edge [--ray-host HOST ...] [--standby-host HOST]`.

Owns the listening sockets of both doors and passes them to HAProxy, so that connections wait in the kernel while a
crashed HAProxy is replaced. Loads new certificates, priorities and tenants when their files change, and publishes the
standby's metrics from HAProxy's state. Runs next to the servers (the embedded stack) or in its own container. HAProxy
comes in a wheel.
"""

import argparse
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

import structlog
from prometheus_client import REGISTRY

from infra.local.binaries import haproxy_command, interrupt_no_other_process
from infra.local.edge.admin import num_refused, ray_is_up, swap_certificates, swap_maps, write_maps
from infra.local.edge.config import EdgePlan, Upstream, check_files, edge_folder
from models.files import Stamp, stamp_of
from services.errors import ConfigError
from services.observability.log_lines import configure_logging
from services.observability.metrics import EdgeMetrics
from services.settings.settings import Settings, ending_with_error, load_settings

log = structlog.get_logger()

POLL_S = 1.0
STOP_S = 6.0
MIN_LIFE_S = 2.0
"""A HAProxy that ends sooner is not restarted: its configuration is invalid or it cannot run here."""
BACKLOG = 1_024
"""Connections that may wait for HAProxy's restart; the kernel may allow fewer (net.core.somaxconn)."""


class TakeoverWatch:
    """Publishes whether the standby answers, as found by HAProxy's checks."""

    def __init__(self, metrics: EdgeMetrics) -> None:
        self._metrics = metrics
        self._is_active = True
        """Before the first check the state of Ray is unknown; its start is not a takeover."""
        metrics.active.set(True)

    def observe(self, is_ray_up: bool | None) -> None:
        """Record one observation; None changes nothing."""
        is_active = self._is_active if is_ray_up is None else not is_ray_up
        if is_active is self._is_active:
            return
        self._is_active = is_active
        self._metrics.active.set(is_active)
        if is_active:
            self._metrics.takeovers.inc()
            log.warning("standby_took_over")
        else:
            log.info("standby_handed_back")


class RefusalWatch:
    """Publishes how many requests HAProxy refused, across its restarts."""

    def __init__(self, metrics: EdgeMetrics) -> None:
        self._metrics = metrics
        self._num_before = 0

    def observe(self, num: int | None) -> None:
        """Record HAProxy's count since its start; None changes nothing."""
        if num is None:
            return
        self._metrics.refused.inc(num - self._num_before if num >= self._num_before else num)
        self._num_before = num


class Edge:
    """HAProxy, restarted when it crashes, until SIGTERM."""

    def __init__(
        self,
        plan: EdgePlan,
        folder: Path,
        watch: TakeoverWatch | None,
        refusals: RefusalWatch,
        keys_file: Path | None = None,
        tenants_file: Path | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._watch = watch
        self._refusals = refusals
        self._stamps = self._current_stamps()
        self._keys_file = keys_file
        self._tenants_file = tenants_file
        self._map_stamps = self._current_map_stamps()

    def run(self) -> int:
        """Run until SIGTERM or until HAProxy keeps failing. Returns its exit code."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._keys_file is not None:
            write_maps(self._folder, self._keys_file, self._tenants_file)
        (self._folder / "haproxy.cfg").write_text(self._plan.render())
        interrupt_no_other_process()
        while True:
            started_s = time.monotonic()
            code = self._run_haproxy()
            if time.monotonic() - started_s < MIN_LIFE_S:
                return code
            log.error("haproxy_died", code=code)

    def _run_haproxy(self) -> int:
        child = subprocess.Popen(
            haproxy_command(self._folder / "haproxy.cfg"),
            cwd=self._folder,
            pass_fds=(self._plan.http_fd, self._plan.grpc_fd),
        )
        ended = os.pidfd_open(child.pid)
        try:
            while not select.select([ended], [], [], POLL_S)[0]:
                self._look()
        except SystemExit:
            log.info("stopping")
            raise
        finally:
            os.close(ended)
            _stop(child)
        return child.returncode

    def _look(self) -> None:
        if self._watch is not None:
            self._watch.observe(ray_is_up(self._folder))
        self._refusals.observe(num_refused(self._folder))
        if (stamps := self._current_stamps()) != self._stamps:
            self._stamps = stamps
            self._swap()
        if self._keys_file is not None and (stamps := self._current_map_stamps()) != self._map_stamps:
            self._map_stamps = stamps
            self._swap_maps(self._keys_file)

    def _swap(self) -> None:
        """Load the new certificates, or log why not; a half-written pair is retried when its other half changes."""
        try:
            swap_certificates(self._folder, self._plan)
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            log.error("certificates_refused", error=str(error))  # noqa: TRY400 - no bug of ours
        else:
            log.info("certificates_swapped", certificate=str(self._plan.certificate))

    def _swap_maps(self, keys_file: Path) -> None:
        """Load the new priorities and tenants, or log why not; the old ones apply until a file changes again."""
        try:
            swap_maps(self._folder, keys_file, self._tenants_file)
        except (ConfigError, OSError) as error:
            log.error("key_priorities_refused", error=str(error))  # noqa: TRY400 - no bug of ours
        else:
            log.info("key_priorities_swapped")

    def _current_map_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(None if path is None else stamp_of(path) for path in (self._keys_file, self._tenants_file))

    def _current_stamps(self) -> tuple[Stamp | None, ...]:
        paths = (self._plan.certificate, self._plan.key, self._plan.client_ca_file)
        return tuple(None if path is None else stamp_of(path) for path in paths)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """Let HAProxy finish requests in flight, for a few seconds."""
    if child.poll() is None:
        child.send_signal(signal.SIGUSR1)
        try:
            child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket for HAProxy that listens on this address. Raises ConfigError if it cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; free the port or set another port"
        ) from error
    listening.set_inheritable(True)
    return listening


def run_edge(settings: Settings, ray_hosts: Sequence[str], standby_host: str) -> int:
    """Open both doors and run HAProxy behind them; one host per Ray node. Raises ConfigError."""
    if settings.tls_dir is not None:
        check_files(settings.tls_dir, settings.tls_client_ca_file)
    with ExitStack() as closing:
        http, grpc = (
            closing.enter_context(_listen(settings.http_host, port))
            for port in (settings.http_port, settings.grpc_port)
        )
        keys_file = settings.api_keys_file
        if keys_file is not None and not keys_file.is_file():  # a container without the file has one priority for all
            keys_file = None
        standby = Upstream(standby_host, settings.standby_http_port, settings.standby_grpc_port)
        plan = EdgePlan(
            http_fd=http.fileno(),
            grpc_fd=grpc.fileno(),
            ray=tuple(Upstream(host, settings.inner_http_port, settings.inner_grpc_port) for host in ray_hosts),
            standby=standby if settings.standby else None,
            tls_dir=settings.tls_dir,
            client_ca_file=settings.tls_client_ca_file,
            has_keys=keys_file is not None,
            has_tenants=keys_file is not None and settings.tenants_file is not None,
            default_deadline_ms=settings.default_deadline_ms,
            node_patience_percent=settings.node_patience_percent,
            max_requests=settings.gateway_replicas * settings.gateway_max_ongoing,
        )
        metrics = EdgeMetrics(REGISTRY)
        watch = TakeoverWatch(metrics) if settings.standby else None
        folder, refusals = edge_folder(settings.state_dir), RefusalWatch(metrics)
        return Edge(plan, folder, watch, refusals, keys_file, settings.tenants_file).run()


@ending_with_error()
def main() -> None:
    """Read settings and run. Bad settings exit with their error."""
    signal.signal(signal.SIGTERM, _leave)
    settings = load_settings()
    parser = argparse.ArgumentParser(
        prog="python -m infra.local.edge", description="Run HAProxy in front of both doors."
    )
    parser.add_argument(
        "--ray-host", action="append", metavar="HOST", help="where Ray's ingress listens; once for each of Ray's nodes"
    )
    parser.add_argument("--standby-host", default="127.0.0.1", metavar="HOST", help="where the standby listens")
    hosts = parser.parse_args()
    configure_logging(settings.log_level, "edge", settings.log_file)
    raise SystemExit(run_edge(settings, hosts.ray_host or ["127.0.0.1"], hosts.standby_host))


if __name__ == "__main__":
    main()
