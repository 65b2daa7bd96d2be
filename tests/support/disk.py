"""Disks for tests: a recorder of fsyncs and renames in order, to simulate power loss, and a full disk."""

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records all further calls: an fsync as the file's name, a rename as `old -> new`."""
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


class FullDisk:
    """A disk without room for the rest of a Parquet file, until `has_room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room = False
        self.num_refused = 0
        self._write = pq.write_table
        monkeypatch.setattr(pq, "write_table", self._write_or_refuse)

    def _write_or_refuse(self, table: Any, where: Path, **options: Any) -> None:
        if self.has_room:
            self._write(table, where, **options)
            return
        self.num_refused += 1
        where.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
