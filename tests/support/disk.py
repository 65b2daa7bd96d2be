"""Records fsyncs and renames in order, for tests of what a loss of power would leave."""

import os
from pathlib import Path

import pytest


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that records all calls from here on: an fsync as the file's name, a rename as `old -> new`."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def name(self: Path, target: Path) -> Path:
        calls.append(f"{self.name} -> {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", name)
    return calls
