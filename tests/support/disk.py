"""What is written through to disk and which names are given, in order: for tests of what a loss of power would leave."""

import os
from pathlib import Path

import pytest


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list in which everything is noted from here on: what goes to disk by its name, a renaming as `old -> new`."""
    told: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        told.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def name(self: Path, target: Path) -> Path:
        told.append(f"{self.name} -> {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", name)
    return told
