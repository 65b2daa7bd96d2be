"""A file of a server's address that cannot be used is an error that names its setting."""

from pathlib import Path

import pytest

from services.errors import ConfigError
from services.settings.redis_clients import client_options
from services.settings.settings import Settings


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("redis_password_file", None),
        ("redis_password_file", b""),
        ("redis_password_file", b"\xff"),
        ("redis_tls_ca_file", None),
        ("kafka_password_file", None),
        ("kafka_password_file", b"\n"),
        ("kafka_tls_ca_file", None),
    ],
)
def test_an_unusable_file_is_an_error_that_names_its_setting(name: str, content: bytes | None, tmp_path: Path) -> None:
    """An absent, empty or binary file is refused before a client connects, with the setting, the path and a fix."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    settings = Settings(kafka_username="u", kafka_allow_cleartext=True).model_copy(update={name: path})
    kafka, redis = settings.kafka_address, settings.redis_address

    with pytest.raises(ConfigError, match=f"TAILRACE_{name.upper()}: .*{path}.*; "):
        client_options(redis) if name.startswith("redis") else kafka.client_options()
