"""Where Redis is and how to come in: host, user, password, TLS. The password stays in its file until a client is made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.settings.secret_file import read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """One Redis-protocol server. Without a password file nobody signs in, without a CA file nothing is encrypted."""

    host: str = "127.0.0.1"
    port: int = 6379
    username: str = ""
    password_file: Path | None = None
    tls_ca_file: Path | None = None

    def client_options(self) -> dict[str, Any]:
        """Return the arguments by which redis-py connects. Holds the password. Raises ConfigError for a bad file."""
        options: dict[str, Any] = {"host": self.host, "port": self.port}
        if self.username:
            options["username"] = self.username
        if self.password_file is not None:
            options["password"] = read_secret(self.password_file)
        return options | self._tls_options()

    def feast_public(self) -> str:
        """Give Feast's connection string without user and password, fit for a file."""
        return _feast_string(self.host, self.port, self._tls_options())

    def feast_string(self) -> str:
        """Give Feast's connection string. Holds the password. Raises ConfigError for a bad file."""
        options = self.client_options()
        return _feast_string(options.pop("host"), options.pop("port"), options)

    def _tls_options(self) -> dict[str, Any]:
        if self.tls_ca_file is None:
            return {}
        return {"ssl": True, "ssl_ca_certs": str(self.tls_ca_file), "ssl_cert_reqs": "required"}


def _feast_string(host: str, port: int, options: dict[str, Any]) -> str:
    """Write `host:port,name=value,...`: Feast splits at commas, then reads each value as JSON."""
    words = (f"{name}={json.dumps(value)}".replace(",", "\\u002c") for name, value in options.items())
    return ",".join((f"{host}:{port}", *words))
