"""Run Ray and the Serve application in one process tree until killed: `python -m infra.local.servers.serve`.

Needs `ray_home.ray_environment` in its environment, because Ray Serve reads it at import. Ends with an error if one of
Ray's own servers dies, because a cluster without a head never recovers; the supervisor then restarts all of it.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

import psutil
import structlog

from infra.local.servers.environment import metrics_environment
from infra.local.servers.lean_ray import (
    SETUP_HOOK,
    import_serve,
    skip_unused_servers,
    start_replicas_beside_haproxy,
)
from infra.local.servers.loopback import LOOPBACK
from infra.local.servers.ray_home import ray_home
from services.garbage import collect_rarely
from services.observability.log_lines import configure_logging
from services.settings.settings import Settings, load_settings

log = structlog.get_logger()

OBJECT_STORE_BYTES = 100 * 2**20
_APPLICATION = "tailrace"
_CORE_SERVERS = ("gcs_server", "raylet")


def main() -> None:
    """Start the application, then wait on Ray's servers."""
    settings = load_settings()
    configure_logging(settings.log_level, "serve", settings.log_file)
    collect_rarely()
    signal.signal(signal.SIGTERM, _leave)
    _start_ray(settings)
    signal.signal(signal.SIGTERM, _leave)  # again: Ray has set its own handler, which waits for its children
    _run_application(settings)
    _watch()


def _start_ray(settings: Settings) -> None:
    import ray

    skip_unused_servers()
    threading.Thread(target=import_module, args=("services.app",), daemon=True).start()  # while Ray's servers start
    ray.init(
        address="local",
        num_cpus=0,  # no actor here claims a CPU, and Ray keeps an idle worker for each
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        runtime_env={
            "env_vars": metrics_environment(settings),  # our actors only: Ray's own metrics stay out of the folder
            "worker_process_setup_hook": SETUP_HOOK,
        },
        _temp_dir=str(ray_home(settings.state_dir)),
    )


def _run_application(settings: Settings) -> None:
    import_serve()
    start_replicas_beside_haproxy()
    from ray import serve

    from services.app import GRPC_SERVICERS, build_app

    serve.start(
        http_options={"host": LOOPBACK, "port": settings.inner_http_port},
        grpc_options={"port": settings.inner_grpc_port, "grpc_servicer_functions": list(GRPC_SERVICERS)},
    )
    try:
        serve.run(build_app(settings), name=_APPLICATION, route_prefix="/")
    except RuntimeError as error:  # it names the deployment, and its status gives the reason
        deployments = serve.status().applications[_APPLICATION].deployments
        sys.exit("\n".join((str(error), *(deployment.message for deployment in deployments.values()))))


def _watch() -> NoReturn:
    """End as soon as one of Ray's servers ends: a HAProxy that outlives them answers with errors."""
    for child in psutil.Process().children():
        if child.name() in _CORE_SERVERS:
            threading.Thread(target=_end_with, args=(child.pid,), daemon=True).start()
    while True:
        signal.pause()


def _end_with(server_pid: int) -> NoReturn:
    """End at once when this child ends, without reaping it, which Ray does."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, server_pid, os.WEXITED | os.WNOWAIT)
    with suppress(OSError):  # a full disk behind the log
        sys.stderr.write("a server of Ray died\n")
    os._exit(1)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    log.info("stopping", signal=signal.Signals(number).name)
    os._exit(0)  # the keeper cleans up; an orderly shutdown of Ray takes too long


if __name__ == "__main__":
    main()
