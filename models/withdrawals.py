"""Withdrawn bundles: which version was taken back, by whom, when and why, and what may not go live for that. Pure.

A withdrawn version, and one of the same content under another name, does not go live without force. A record outlives the folder of
its bundle, since what made the bundle can make it again; a forced promotion removes it.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256

from models.documents import Schema
from models.errors import BundleWithdrawn

SERVING = "serving/"
"""What the names of a manifest's values on serving begin with, among the names of files: a decoder in 4 bits is not the same in 8."""
_SERVING = ("decoder/", "student.onnx", "student_table/", "catalogue.parquet", SERVING)
"""The files that answer requests, and how they are served: reports, and what only a later training reads, may differ between identical bundles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """One withdrawn version. `at` is UTC, ISO 8601; `reason` may be empty; `content` identifies what the bundle answered with."""

    version: str
    by: str
    at: str
    reason: str
    content: str

    def describe(self) -> str:
        """Return a sentence on who withdrew it, when and why."""
        return f"{self.version} was withdrawn by {self.by} at {self.at} ({self.reason or 'no reason given'})"


class StoredWithdrawal(Schema):
    """A withdrawal as a name's record holds it, under its version."""

    by: str
    at: str
    reason: str
    content: str


def content_of(files: Mapping[str, str]) -> str:
    """Return the hash of what a bundle with these files (hashes by name) answers with; of one that holds no such file, of all."""
    serving = {name: digest for name, digest in files.items() if name.startswith(_SERVING)} or dict(files)
    return sha256(json.dumps(serving, sort_keys=True).encode()).hexdigest()


def refuse(
    records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str], ancestors: Collection[str] = ()
) -> None:
    """Raise BundleWithdrawn where this version, an identical one, or one of these that it was made from is on record."""
    content = content_of(files)
    same = records.get(version) or next((one for one in records.values() if one.content == content), None)
    parent = next((one for name, one in records.items() if name in ancestors), None)
    if (found := same or parent) is not None:
        twin = "" if found.version == version else f"{version} is identical to {found.version}: "
        twin = twin if same is not None else f"{version} was made from {found.version}: "
        raise BundleWithdrawn(f"{twin}{found.describe()}; --force makes it live all the same")


def without(records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str]) -> dict[str, Withdrawal]:
    """Return the records that are neither of this version nor of an identical one."""
    content = content_of(files)
    return {name: one for name, one in records.items() if name != version and one.content != content}
