"""The `tailrace` command, run in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.cli.main import main


@dataclass
class Completed:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Completed]


@pytest.fixture
def tailrace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process with these settings and a temporary state folder."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: str) -> Completed:
        for name, value in settings.items():
            monkeypatch.setenv(f"TAILRACE_{name.upper()}", value)
        monkeypatch.setattr(sys, "argv", ["tailrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Completed(int(ended.value.code or 0), *capfd.readouterr())

    return run
