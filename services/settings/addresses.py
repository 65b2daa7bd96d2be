"""Addresses and credentials of Redis and Kafka. A password stays in its file until a connection is made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.errors import ConfigError

REDIS_PASSWORD_FILE, KAFKA_PASSWORD_FILE = "TAILRACE_REDIS_PASSWORD_FILE", "TAILRACE_KAFKA_PASSWORD_FILE"


def check_ca_file(path: Path, setting: str) -> None:
    """Raise ConfigError for a certificate authority's file that is absent, naming its setting."""
    if not path.is_file():
        raise ConfigError(f"{setting}: no file {path}; name the PEM file of the server's certificate authority")


def read_secret(path: Path, setting: str) -> str:
    """Return the text, without the final line break, of the file that this setting or option names.

    Raises ConfigError for an unreadable, non-text or empty file. The message quotes nothing from the file.
    """
    try:
        secret = path.read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"{setting}: secret file {path}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: secret file {path}: not UTF-8 text; write the secret into it") from None
    if not secret:
        raise ConfigError(f"{setting}: secret file {path}: empty; write the secret into it")
    return secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """One Redis-protocol server. A password file turns authentication on, a CA file TLS."""

    host: str = "127.0.0.1"
    port: int = 6379
    username: str = ""
    password_file: Path | None = None
    tls_ca_file: Path | None = None

    def feast_string(self) -> str:
        """Return Feast's connection string, without user and password, since it may be written to a file.

        Feast splits `host:port,name=value,...` at commas, then reads each value as JSON.
        """
        words = (f"{name}={json.dumps(value)}".replace(",", "\\u002c") for name, value in self.tls_options().items())
        return ",".join((f"{self.host}:{self.port}", *words))

    def tls_options(self) -> dict[str, Any]:
        """Return redis-py's arguments for TLS."""
        if self.tls_ca_file is None:
            return {}
        return {"ssl": True, "ssl_ca_certs": str(self.tls_ca_file), "ssl_cert_reqs": "required"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaAddress:
    """Brokers as `host:port,host:port`. A user turns authentication on, a CA file TLS."""

    bootstrap: str
    username: str = ""
    password_file: Path | None = None
    sasl_mechanism: str = "SCRAM-SHA-512"
    tls_ca_file: Path | None = None

    @property
    def security_protocol(self) -> str:
        """Kafka's name for the combination of TLS and SASL."""
        kind = "SSL" if self.tls_ca_file is not None else "PLAINTEXT"
        return f"SASL_{kind}" if self.username else kind

    def client_options(self) -> dict[str, Any]:
        """Return the arguments of kafka-python's clients, with the password. Raises ConfigError for a bad file."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security_protocol,
        }
        if self.tls_ca_file is not None:
            check_ca_file(self.tls_ca_file, "TAILRACE_KAFKA_TLS_CA_FILE")
            options["ssl_cafile"] = str(self.tls_ca_file)
        if self.username:
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.username
        if self.password_file is not None:
            options["sasl_plain_password"] = read_secret(self.password_file, KAFKA_PASSWORD_FILE)
        return options
