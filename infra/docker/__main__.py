"""The entry point of every container of the image: `python -m infra.docker ROLE`, one role per container.

keys      make missing secrets, then end
show-key  print the operator's API key
prepare   make missing topics, the feature registry and the text checkpoint, then end
pipeline  train and publish, unless a bundle is live already, then end
worker    Kafka to features, with its metrics endpoint
release   the judge of releases, with its metrics endpoint
serve     Ray Serve with the gateways, with its metrics endpoint; --standby-host HOST answers while no gateway lives
standby   the gateway outside Ray, with its metrics endpoint
edge      HAProxy in front of both doors, with its metrics endpoint; takes the options of infra.local.edge
tailrace  the command of that name, with its arguments
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from infra.local.servers.environment import metrics_environment
from infra.local.servers.metrics import metrics_server
from services.errors import ConfigError, TailraceError
from services.settings.settings import Settings, inherited_environment, load_settings

SECRETS = Path("/secrets")
_STANDARD_ERROR = 2
_LAST_LINES_S = 5.0
EVERYWHERE = "0.0.0.0"  # noqa: S104 - inside the container; no port of the metrics is published


def main() -> None:
    """Run the role named on the command line and exit with its code, or with 1 for a TailraceError."""
    words = sys.argv[1:] or ["serve"]
    try:
        sys.exit(_run(words[0], words[1:]))
    except TailraceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def _run(role: str, words: list[str]) -> int:
    if role in {"keys", "show-key"}:
        return _keys(role)
    if role == "tailrace":
        _become("infra.cli.main", *words)
    settings = load_settings()
    if role == "prepare":
        return _prepare(settings)
    if role == "pipeline":
        return _pipeline(settings, words)
    if role == "worker":
        return run_beside_metrics(_python("services.stream"), {"OMP_NUM_THREADS": "1"}, settings)
    if role == "release":
        threads = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
        return run_beside_metrics(_python("pipelines.release"), threads, settings)
    if role == "standby":
        return run_beside_metrics(_python("infra.local.standby"), {"OMP_NUM_THREADS": "1"}, settings)
    if role == "edge":
        return run_beside_metrics((*_python("infra.local.edge"), *words), {}, settings)
    if role == "serve":
        return _serve(settings, words)
    raise ConfigError(
        f"role {role!r}: unknown; give one of keys, show-key, prepare, pipeline, worker, release, serve, standby, "
        "edge, tailrace"
    )


def _keys(role: str) -> int:
    from infra.docker.credentials import make_missing, operator_key

    if role == "show-key":
        sys.stdout.write(operator_key(SECRETS) + "\n")
        return 0
    for path in make_missing(SECRETS):
        sys.stdout.write(f"made {path}\n")
    return 0


def _prepare(settings: Settings) -> int:
    from rich.console import Console

    from infra.kafka.topics import create_missing
    from infra.local.servers.text import ready_text
    from services.features.repo import RepoAddress, ensure_applied
    from services.settings.kafka_topics import wanted_topics

    for name in create_missing(settings.kafka_address.client_options(), wanted_topics(settings)):
        sys.stdout.write(f"made topic {name}\n")
    ensure_applied(RepoAddress(settings.feature_repo_dir, settings.redis_address))
    settings.stages_dir.mkdir(parents=True, exist_ok=True)  # erasures stay pending while it is absent
    if settings.text_path:
        sys.stdout.write(f"text is served from {ready_text(settings, Console()).text_path}\n")
    return 0


def _pipeline(settings: Settings, words: list[str]) -> int:
    from models.registry.store import BundleStore

    version = BundleStore.of(settings, settings.first_name).live_version()
    if version is None:
        _become("infra.cli.main", "pipeline", "--name", settings.first_name, *words)
    sys.stdout.write(f"{version} is already live; `tailrace pipeline` as this container's command trains again\n")
    return 0


def _serve(settings: Settings, words: list[str]) -> int:
    from infra.local.servers.ray_home import make_ray_home, ray_environment

    parser = argparse.ArgumentParser(prog="serve", description="Run Ray Serve with the gateways.")
    parser.add_argument("--standby-host", default="127.0.0.1", metavar="HOST", help="where the standby listens")
    home = make_ray_home(settings.state_dir)
    for_ray = ray_environment(home, settings, standby_host=parser.parse_args(words).standby_host)
    log_file = settings.metrics_dir.with_name("gateway.log")  # the output of Ray's workers goes elsewhere
    environment = {**for_ray, "TAILRACE_LOG_FILE": str(log_file)}
    return run_beside_metrics(_python("infra.local.servers.serve"), environment, settings, log_file)


def _become(module: str, *words: str) -> NoReturn:
    command = (*_python(module), *words)
    os.execve(command[0], command, inherited_environment())  # noqa: S606 - our own interpreter


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def run_beside_metrics(
    command: tuple[str, ...], environment: Mapping[str, str], settings: Settings, log_file: Path | None = None
) -> int:
    """Run the command to its end together with the endpoint that Prometheus scrapes, and return its exit code.

    The child has `PROMETHEUS_MULTIPROC_DIR` before its Python starts; the endpoint is a thread of this process. SIGTERM
    and SIGINT are forwarded. Lines of `log_file` are copied to standard output, and the child's own output goes to
    standard
    error: there Ray's driver reports the death of a worker. Empties the metrics folder.
    """
    shutil.rmtree(settings.metrics_dir, ignore_errors=True)
    settings.metrics_dir.mkdir(parents=True)
    endpoint = metrics_server(EVERYWHERE, settings.metrics_port, settings.metrics_dir)
    thread = threading.Thread(target=endpoint.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        complete = {**inherited_environment(), **metrics_environment(settings), **environment}
        return _run_child(complete, command, log_file)
    finally:
        endpoint.shutdown()
        thread.join()
        endpoint.server_close()


def _run_child(environment: Mapping[str, str], command: tuple[str, ...], log_file: Path | None) -> int:
    child = subprocess.Popen(command, env=environment, stdout=None if log_file is None else _STANDARD_ERROR)
    following = None if log_file is None else _follow(log_file, child.pid)

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    finally:
        if following is not None:
            following.wait(_LAST_LINES_S)
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(log_file: Path, pid: int) -> "subprocess.Popen[bytes]":
    """Copy the file's lines to standard output until this process ends, across the file's rotation."""
    log_file.touch()
    options = ("--lines=+1", "--follow=name", "--retry", f"--pid={pid}", "--sleep-interval=0.2")
    command = ("/usr/bin/tail", *options, str(log_file))
    return subprocess.Popen(command, start_new_session=True)  # no Ctrl-C before its last lines


if __name__ == "__main__":
    main()
