"""Keeps a single-node Ray from starting what serves nothing here, and its processes from waking up without a reason.

Ray's autoscaler, log forwarder, dashboard and fallback proxy are Python processes: together seconds of the start and a
tenth of the stack's processor time at rest. Its dashboard's agent does nothing without the dashboard, and its workers
import Ray twice: `ray_agent` and `ray_worker` replace them. `ray_ingress` asks the standby where Ray's HAProxy would
ask the fallback proxy. Each process of Ray Serve would import pandas, half a second, to encode data frames that no one
sends, and the replicas would wait for HAProxy. Ray has no options for them. Replaces private methods and functions,
read in ray 2.60.0.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

from infra.local.servers import ray_agent, ray_worker
from infra.local.servers.loopback import listen_on_loopback

SETUP_HOOK = f"{__name__}.set_up_worker"
"""Names the function below in a runtime environment."""
_TICK_S = 1.0


def skip_unused_servers() -> None:
    """Let `ray.init` in this process start a node without autoscaler, log forwarder and dashboard."""
    from ray._private import utils
    from ray._private.node import Node

    for start in ("start_monitor", "start_log_monitor", "start_api_server"):
        _replace(Node, start, _start_nothing)
    # it imports the dashboard's servers to see whether the node's agent can
    _replace(utils, "get_dashboard_dependency_error", lambda: "unused")
    _start_lean_processes()


def _start_lean_processes() -> None:
    import ray
    from ray._private import services

    start, folder = services.start_ray_process, Path(ray.__file__).parent

    def with_ours(command: list[str], process_type: str, **options: Any) -> Any:
        return start(lean_command(command, folder) if process_type == "raylet" else command, process_type, **options)

    _replace(services, "start_ray_process", with_ours)


def lean_command(command: Sequence[str], ray_folder: Path) -> list[str]:
    """Return the node server's command with our programs for workers and agent. Raises ValueError if it has others."""
    words = list(command)
    for option, theirs, ours in (
        ("--python_worker_command=", "_private/workers/setup_worker.py", ray_worker.__file__),
        ("--dashboard_agent_command=", "dashboard/agent.py", ray_agent.__file__),
    ):
        index = next(index for index, word in enumerate(words) if word.startswith(option))
        before, program, after = words[index].partition(list2cmdline([str(ray_folder / theirs)]))
        if not program:
            raise ValueError(f"{option}{theirs} is not in Ray's command; review this file for this version of Ray")
        words[index] = f"{before}{list2cmdline([ours])}{after}"
    return words


def import_serve() -> None:
    """Import Ray Serve without pandas, which stays importable."""
    if "pandas" in sys.modules:
        return
    sys.modules["pandas"] = None  # type: ignore[assignment]  # makes its import fail, as documented
    try:
        import ray.serve  # noqa: F401 - for its effect
    finally:
        del sys.modules["pandas"]


def start_replicas_beside_haproxy() -> None:
    """Let `serve.start` in this process return before HAProxy is ready."""
    from ray.serve._private import api

    create = api._create_controller_and_proxy_refs

    def without_waiting(*arguments: Any, **options: Any) -> tuple[Any, list[Any]]:
        controller, _ready = create(*arguments, **options)
        return controller, []

    _replace(api, "_create_controller_and_proxy_refs", without_waiting)


def set_up_worker() -> None:
    """Change this process before its actor is made; Ray calls this first in each worker."""
    import_serve()
    listen_on_loopback()
    tick_slowly()
    _start_no_fallback_proxy()


def tick_slowly() -> None:
    """Let this process's uvicorn servers look once a second, instead of ten times, whether they should stop."""
    from uvicorn import Server

    async def main_loop(server: Any) -> None:
        while not await server.on_tick(0):  # noqa: ASYNC110 - a signal handler ends it
            await asyncio.sleep(_TICK_S)

    _replace(Server, "main_loop", main_loop)


def _start_no_fallback_proxy() -> None:
    from ray.serve._private.haproxy import HAProxyApi
    from ray.serve._private.proxy_state import ProxyStateManager

    async def is_ready(_api: Any) -> bool:
        return True

    _replace(ProxyStateManager, "_start_fallback_proxy_if_needed", lambda *_: None)
    _replace(HAProxyApi, "is_grpc_fallback_ready", is_ready)


def _start_nothing(node: Any, *_arguments: object, **_options: object) -> None:
    node._webui_url = ""


def _replace(owner: Any, name: str, method: Any) -> None:
    """Replace a method. Raises AttributeError if this version lacks it."""
    getattr(owner, name)
    setattr(owner, name, method)
