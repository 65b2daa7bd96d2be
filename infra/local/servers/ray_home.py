"""The folder and the environment of one stack's Ray, so that stacks on one machine share nothing. Starts nothing.

Unix socket paths are limited to 107 characters, and Ray's and HAProxy's paths need 80 of them, so the folder is
`/tmp/tr-<hash>`, not below the state folder. It has mode 700 and is removed with the stack; its logs are kept.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from infra.local.edge.config import Upstream
from infra.local.servers import loopback
from infra.local.servers.ray_ingress import IngressPlan, ingress_environment
from infra.local.supervisor.ports import free_window
from services.errors import EnvironmentFault
from services.settings.settings import Settings

_ROOT = Path("/tmp")  # noqa: S108 - short on purpose, owner and mode are checked
_NUM_REPLICA_PORTS = 30
_WIDTH = 2 * _NUM_REPLICA_PORTS + 4
SERVING_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ROTATION_MAX_BYTES": str(20 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_worker_niceness": "0",  # Ray's default of 15 gives replicas a thirtieth of the CPU weight of their neighbours
    "RAY_process_group_cleanup_enabled": "0",  # the part's process group shows which processes are the stack's
    "RAY_enable_metrics_collection": "0",  # nothing reads Ray's own metrics
    "RAY_task_events_report_interval_ms": "0",  # nor its history of tasks
    "RAY_event_stats": "0",
    "RAY_memory_monitor_refresh_ms": "1000",  # default 250
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # default 0.1: each loop asks Ray's head three times for its nodes
    "RAY_raylet_report_resources_period_milliseconds": "1000",  # default 100
    "RAY_raylet_check_gc_period_milliseconds": "1000",  # default 100
    "RAY_object_manager_timer_freq_ms": "1000",  # default 100: no request uses Ray's object store
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # default 5000: nothing reads the node's statistics
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # default 1,000 in throughput mode: a crash loses tracebacks
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # default 5: a start next to an answering standby takes longer
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",  # a replica died during a request: ask another
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",  # a refused connection: the next request goes elsewhere
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # glibc's default is 8 per core: a gateway's 48 threads leave a megabyte or two in each
}
"""Variables for Ray and Ray Serve on every node, of one or several."""


def ray_home(state_dir: Path) -> Path:
    return _ROOT / f"tr-{hashlib.blake2b(f'{os.getuid()}:{state_dir}'.encode(), digest_size=4).hexdigest()}"


def make_ray_home(state_dir: Path) -> Path:
    """Make the folder, empty. Raises EnvironmentFault if it belongs to another user."""
    home = ray_home(state_dir)
    remove_ray_home(state_dir)
    try:
        home.mkdir(mode=0o700)
    except FileExistsError as error:
        raise EnvironmentFault(f"{home} belongs to another user; set TAILRACE_STATE_DIR to another folder") from error
    return home


def remove_ray_home(state_dir: Path) -> None:
    """Remove the folder if this user owns it; its logs replace the last run's in `<state>/logs/ray`, if possible."""
    home = ray_home(state_dir)
    if not home.is_dir() or home.is_symlink() or home.lstat().st_uid != os.getuid():
        return
    logs, kept = ray_logs(state_dir), state_dir / "logs" / "ray"
    if logs.is_dir():
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):  # a full disk, which the removal below may relieve
            shutil.copytree(logs, kept, ignore_dangling_symlinks=True)
    shutil.rmtree(home, ignore_errors=True)


def ray_logs(state_dir: Path) -> Path:
    """Return the folder where Ray and the replicas write while they run."""
    return ray_home(state_dir) / "session_latest" / "logs"


def serve_environment(
    folder: Path, settings: Settings, standby_host: str, doors_host: str | None = None
) -> dict[str, str]:
    """Return the variables of Ray Serve and of its HAProxy, whose files are in `folder`.

    With `doors_host` None, the doors listen on Ray's host. gRPC messages over the settings' limit are refused unread,
    before authentication.
    """
    standby = Upstream(standby_host, settings.standby_http_port, settings.standby_grpc_port)
    return {
        **SERVING_ENVIRONMENT,
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.max_rpc_bytes),
        **ingress_environment(
            IngressPlan(doors_host, standby if settings.standby else None, settings.default_deadline_ms)
        ),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
    }


def ray_environment(
    home: Path, settings: Settings, reserved: Collection[int] = (), standby_host: str = "127.0.0.1"
) -> dict[str, str]:
    """Return the variables that Ray, Ray Serve and HAProxy read at their start.

    Calls need a token made for this start, because Ray runs the code of any caller. Only HAProxy's doors listen on the
    configured host, all else on loopback. Internal ports come from a window that is free now, without the ports
    `reserved` for other parts.
    """
    first = free_window(_WIDTH, seed=str(home), reserved=reserved)
    http_first, grpc_first = first + 4, first + 4 + _NUM_REPLICA_PORTS
    return {
        "RAY_worker_maximum_startup_concurrency": str(os.cpu_count() or 1),  # default: the CPUs of `ray.init`, 0 here
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **serve_environment(home / "h", settings, standby_host, settings.inner_host),
        **loopback.ENVIRONMENT,
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(first),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(first + 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first + 2),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(first + 3),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http_first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http_first + _NUM_REPLICA_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc_first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc_first + _NUM_REPLICA_PORTS),
    }
