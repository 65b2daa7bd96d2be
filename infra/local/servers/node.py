"""Settings of one of several Ray nodes without Kubernetes: `python -m infra.local.servers.node environment|serve ...`.

`environment` prints the variables of Ray and its replicas on every node, for a shell or systemd's EnvironmentFile;
`serve` prints the Serve configuration of the `prod` overlay with one gateway and one LLM replica on each node with room
for them. Starts nothing.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from infra.local.servers.environment import log_environment
from infra.local.servers.ray_home import serve_environment
from services.errors import ConfigError
from services.settings.settings import Settings, ending_with_error, load_settings

_SERVE = Path(__file__).resolve().parents[2] / "kubernetes/overlays/prod/serve.yaml"
_RECONNECT_S = 600
"""How long nodes wait for an unavailable head, as under KubeRay; their replicas answer meanwhile."""


def node_environment(settings: Settings, standby_host: str, token_file: Path) -> dict[str, str]:
    """Return the variables of Ray, Ray Serve and HAProxy on a node. `token_file` holds the token for calls to Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        **serve_environment(settings.state_dir / "h", settings, standby_host),
        **log_environment(settings),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_RECONNECT_S),
    }


def serve_config(settings: Settings, num_nodes: int) -> dict[str, Any]:
    """Return the Serve configuration for this many nodes with replicas.

    Each node gets one gateway and one LLM replica, so that any node may stop.
    """
    config: dict[str, Any] = yaml.safe_load(_SERVE.read_text())
    config["http_options"]["port"] = settings.inner_http_port
    config["grpc_options"]["port"] = settings.inner_grpc_port
    (application,) = config["applications"]
    application["runtime_env"]["env_vars"] = {"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_dir)}
    for deployment in application["deployments"]:
        del deployment["autoscaling_config"]
        deployment |= {"num_replicas": num_nodes, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 1}}
    return config


@ending_with_error()
def main() -> None:
    """Print the variables or the Serve configuration. Bad settings and options exit with their error."""
    parser = argparse.ArgumentParser(prog="python -m infra.local.servers.node", description="Settings of Ray's nodes.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    environment = kinds.add_parser("environment", help="the variables of every node")
    environment.add_argument("--standby-host", required=True, metavar="HOST", help="where the standby listens")
    environment.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="the cluster's token")
    serve = kinds.add_parser("serve", help="the Serve configuration")
    serve.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes that run replicas")
    options = parser.parse_args()
    settings = load_settings()
    if options.kind == "serve":
        if options.nodes < 1:
            raise ConfigError(f"--nodes: {options.nodes} is out of range; give 1 or more")
        sys.stdout.write(yaml.safe_dump(serve_config(settings, options.nodes), sort_keys=False))
        return
    if not options.token_file.is_file():
        raise ConfigError(f"--token-file: no file {options.token_file}; write the cluster's token to it")
    for name, value in node_environment(settings, options.standby_host, options.token_file.absolute()).items():
        sys.stdout.write(f"{name}={shlex.quote(value)}\n")


if __name__ == "__main__":
    main()
