"""What the TLS edge is told: HAProxy's configuration from a plan. Starts nothing.

    callers ── TLS 1.2+, h2 ──▶ edge ── plain, loopback ──▶ doors of Ray Serve

Certificates are named by their paths and read by HAProxy; a private key is copied nowhere.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError

CERTIFICATE, KEY = "tls.crt", "tls.key"
ADMIN_SOCKET = "admin.sock"
"""Relative to the edge's folder, since a socket's path must be short."""

_AWAY = {
    "error": {
        "code": "dependency_away",
        "message": "the gateway is away",
        "field": None,
        "fix": None,
        "request_id": "",
    }
}


def check_files(tls_dir: Path, client_ca_file: Path | None) -> None:
    """Refuse certificates that are not there. Raises ConfigError."""
    for path, key in (
        (tls_dir / CERTIFICATE, "TLS_DIR"),
        (tls_dir / KEY, "TLS_DIR"),
        (client_ca_file, "TLS_CLIENT_CA_FILE"),
    ):
        if path is not None and not path.is_file():
            raise ConfigError(f"TAILRACE_{key}: no file {path}")


def edge_folder(state_dir: Path) -> Path:
    """Name the folder with the edge's configuration and its admin socket."""
    return state_dir / "run" / "edge"


@dataclass(frozen=True, slots=True)
class Way:
    """From where callers come to where the door is."""

    host: str
    port: int
    to_host: str
    to_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """Both doors' ways, the folder with tls.crt and tls.key, and whose certificates callers must show, if any."""

    rest: Way
    grpc: Way
    tls_dir: Path
    client_ca_file: Path | None = None

    @property
    def certificate(self) -> Path:
        """The certificate's chain; its key is tls.key beside it."""
        return self.tls_dir / CERTIFICATE

    @property
    def key(self) -> Path:
        """The private key."""
        return self.tls_dir / KEY

    def render(self) -> str:
        """Give HAProxy's configuration."""
        return _TEMPLATE.format(
            socket=ADMIN_SOCKET,
            rest=_bind(self.rest, self, "h2,http/1.1"),
            grpc=_bind(self.grpc, self, "h2"),
            to_rest=_address(self.rest.to_host, self.rest.to_port),
            to_grpc=_address(self.grpc.to_host, self.grpc.to_port),
            away=json.dumps(_AWAY, separators=(",", ":")),
        )


def _bind(way: Way, plan: EdgePlan, protocols: str) -> str:
    ask = "" if plan.client_ca_file is None else f" ca-file {_quoted(plan.client_ca_file)} verify required"
    return f"{_address(way.host, way.port)} ssl crt {_quoted(plan.certificate)} alpn {protocols}{ask}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _quoted(path: Path) -> str:
    """Write a path as one word of HAProxy's language, where single quotes end every special meaning."""
    escaped = str(path.absolute()).replace("'", "'\\''")
    return f"'{escaped}'"


_TEMPLATE = """\
global
    maxconn 4096
    nbthread 2
    log stdout format raw local0 notice
    stats socket unix@{socket} mode 600 level admin
    ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets
    ssl-load-extra-del-ext
    hard-stop-after 5s

defaults
    mode http
    log global
    option dontlognull
    option dontlog-normal
    timeout connect 2s
    timeout client 75s
    timeout server 75s
    timeout http-request 10s
    timeout http-keep-alive 75s
    http-error status 503 content-type application/json hdr retry-after 1 string '{away}'

frontend rest
    bind {rest}
    # what callers say of themselves is not believed, and nobody switches Ray Serve's time limit off
    http-request set-header x-forwarded-for %[src]
    http-request del-header x-request-timeout-seconds
    default_backend rest

frontend grpc
    bind {grpc}
    http-request set-header x-forwarded-for %[src]
    http-request del-header x-request-timeout-seconds
    default_backend grpc

backend rest
    server door {to_rest}

backend grpc
    server door {to_grpc} proto h2
"""
