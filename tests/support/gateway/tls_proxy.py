"""TLS in front of a server without it: a real HAProxy in TCP mode, with a generated test certificate."""

from pathlib import Path

import trustme

from infra.local.binaries import haproxy_command
from tests.support.servers import HOST, Server

_CONFIG = """\
global
    log stdout format raw local0 notice
defaults
    mode tcp
    timeout connect 2s
    timeout client 60s
    timeout server 60s
frontend tls
    bind {host}:{port} ssl crt {pem}
    default_backend plain
backend plain
    server plain {host}:{to_port}
"""


def issue(ca: trustme.CA, folder: Path) -> None:
    """Write tls.crt and tls.key for this machine, as in a Kubernetes secret."""
    folder.mkdir(exist_ok=True)
    leaf = ca.issue_cert("localhost", HOST)
    for file, pems in (("tls.crt", leaf.cert_chain_pems), ("tls.key", [leaf.private_key_pem])):
        scratch = folder / f".{file}"
        scratch.write_bytes(b"".join(pem.bytes() for pem in pems))
        scratch.replace(folder / file)


def tls_proxy(folder: Path, ca: trustme.CA, to_port: int, port: int | None = None) -> Server:
    """Build a TLS proxy to `to_port` with a certificate of this authority; not started."""
    folder.mkdir(parents=True, exist_ok=True)
    pem = folder / "server.pem"
    ca.issue_cert(HOST, "localhost").private_key_and_cert_chain_pem.write_to_path(pem)

    def command(port: int) -> list[str]:
        config = folder / "haproxy.cfg"
        config.write_text(_CONFIG.format(host=HOST, port=port, pem=pem, to_port=to_port))
        return haproxy_command(config)

    return Server(command, folder / "proxy.log", port)
