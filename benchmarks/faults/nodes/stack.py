"""Run a cluster of several nodes until stopped: `python -m benchmarks.faults.nodes.stack NAME FOLDER NUM_NODES`.

Runs in the cluster's front, after the layout has been made. The settings are the front's. This is `up` for several
machines.
"""

import secrets
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import yaml

from benchmarks.faults.nodes.layout import HEAD, Layout
from benchmarks.faults.nodes.parts import (
    cluster_environment,
    cluster_parts,
    node_settings,
    serve_part,
    store_parts,
    topics_part,
)
from infra.local.commands.up import local_supervisor
from infra.local.edge.admin import num_ray_up
from infra.local.edge.config import edge_folder
from infra.local.servers.node import serve_config
from infra.local.supervisor.stackfile import StackFile
from infra.local.supervisor.supervisor import StopRequested, Supervisor
from services.errors import EnvironmentFault
from services.settings.settings import Settings, load_settings

_SHARED = ("bundles", "log")
"""A volume that all nodes mount, as on Kubernetes."""
_READY_WITHIN_S = 300.0
_SAY = partial(print, flush=True)


def main() -> None:
    """Run it."""
    name, folder, num_nodes = sys.argv[1:]
    run_cluster(load_settings(), Layout(name, Path(folder), int(num_nodes)))


def run_cluster(settings: Settings, layout: Layout) -> None:
    """Run the cluster until SIGINT or SIGTERM. Raises EnvironmentFault if it cannot start."""
    stack_file = StackFile(settings.state_dir)
    stack_file.claim()
    for machine in (HEAD, *layout.workers):
        _furnish(layout.folder_of(machine), settings.state_dir)
    (settings.state_dir / "control-store").mkdir(exist_ok=True)
    token_file = settings.state_dir / "ray.token"
    token_file.write_text(secrets.token_hex(32))
    environment = cluster_environment(layout, settings, token_file)
    config = settings.state_dir / "serve.yaml"
    config.write_text(yaml.safe_dump(serve_config(node_settings(layout, settings), len(layout.workers))))
    supervisor = local_supervisor(settings, stack_file, _SAY)
    try:
        supervisor.enter("starting")
        supervisor.bring_up(store_parts(settings))
        supervisor.run_once(topics_part())
        supervisor.bring_up(cluster_parts(layout, settings, environment))
        supervisor.run_once(serve_part(layout, environment, config))
        _wait_for_nodes(supervisor, settings, len(layout.workers))
        supervisor.enter("ready")
        _SAY("ready")
        supervisor.watch()
    except StopRequested:
        _SAY("stopping")
    finally:
        supervisor.stop()


def _furnish(folder: Path, state_dir: Path) -> None:
    """Make a node's folder: its metrics and Ray's files, and the shared volume."""
    for name in ("run/metrics", "h", "r"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "features").exists():
        shutil.copytree(state_dir / "features", folder / "features")
    for name in _SHARED:
        (state_dir / name).mkdir(exist_ok=True)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(state_dir / name)


def _wait_for_nodes(supervisor: Supervisor, settings: Settings, num_nodes: int) -> None:
    give_up_s = time.monotonic() + _READY_WITHIN_S
    while num_ray_up(edge_folder(settings.state_dir)) < num_nodes:
        if time.monotonic() > give_up_s:
            raise EnvironmentFault("not every node's gateway answers; see the logs of Ray below nodes/*/r")
        supervisor.tick()


if __name__ == "__main__":
    main()
