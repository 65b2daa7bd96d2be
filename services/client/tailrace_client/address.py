"""A server's address and trust: `http://`, `https://`, `grpc://` or `grpcs://`, host and port."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443, "grpc": 9000, "grpcs": 443}
_ENCRYPTED = {"https", "grpcs"}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the authority to trust (None: the public authorities), and this client's certificate with its key."""

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for HTTP."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    def pems(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return authority, key and certificate in gRPC's form."""
        ca, key, cert = (
            None if file is None else Path(file).read_bytes() for file in (self.ca_file, self.key_file, self.cert_file)
        )
        return ca, key, cert


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address."""

    scheme: str
    host_port: str

    @property
    def is_grpc(self) -> bool:
        """Whether the address names the gRPC door."""
        return self.scheme.startswith("grpc")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme in _ENCRYPTED


def parse_address(text: str, tls: Tls | None) -> Address:
    """Read an address. Raises ValueError with the fix."""
    parts = urlsplit(text)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.path not in {"", "/"}:
        raise ValueError(f"address: {text!r} is none; send such as http://HOST:8000 or grpc://HOST:9000")
    if tls is not None and parts.scheme not in _ENCRYPTED:
        raise ValueError(f"tls: {text!r} is not encrypted; send {parts.scheme}s:// or leave tls out")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(parts.scheme, f"{host}:{parts.port or _DEFAULT_PORTS[parts.scheme]}")
