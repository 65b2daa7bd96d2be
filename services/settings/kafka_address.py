"""Where the Kafka brokers are and how to come in: user, password, TLS. The password stays in its file until a client is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.settings.secret_file import read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaAddress:
    """Brokers as `host:port,host:port`. Without a user nobody signs in, without a CA file nothing is encrypted."""

    bootstrap: str
    username: str = ""
    password_file: Path | None = None
    sasl_mechanism: str = "SCRAM-SHA-512"
    tls_ca_file: Path | None = None

    @property
    def security_protocol(self) -> str:
        """Kafka's name for what is switched on."""
        kind = "SSL" if self.tls_ca_file is not None else "PLAINTEXT"
        return f"SASL_{kind}" if self.username else kind

    def client_options(self) -> dict[str, Any]:
        """Return the arguments by which kafka-python connects. Holds the password. Raises ConfigError for a bad file."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security_protocol,
        }
        if self.tls_ca_file is not None:
            options["ssl_cafile"] = str(self.tls_ca_file)
        if self.username:
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.username
        if self.password_file is not None:
            options["sasl_plain_password"] = read_secret(self.password_file)
        return options
