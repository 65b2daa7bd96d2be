"""The record of withdrawn bundles: which version was taken back, by whom, when and why. One JSON file beside the pointers. No torch.

A withdrawn version, and one of the same content under another name, does not go live without force. A record outlives the folder of
its bundle, since what made the bundle can make it again; a forced promotion removes it. Knows no lock: the store writes under its own.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from models.errors import BundleCorrupt, BundleWithdrawn
from models.files import rename_durably

FILE = "WITHDRAWN"
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


def content_of(files: Mapping[str, str]) -> str:
    """Return the hash of what a bundle with these files (hashes by name) answers with; of one that holds no such file, of all."""
    serving = {name: digest for name, digest in files.items() if name.startswith(_SERVING)} or dict(files)
    return sha256(json.dumps(serving, sort_keys=True).encode()).hexdigest()


def read_withdrawals(root: Path) -> dict[str, Withdrawal]:
    """Return the records of a store by version, oldest first. Raises BundleCorrupt."""
    path = root / FILE
    try:
        found = json.loads(path.read_text())
        return {version: Withdrawal(version=version, **fields) for version, fields in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BundleCorrupt(f"{path}: no record of withdrawn bundles; mend it, or remove it to forget them") from error


def write_withdrawals(root: Path, scratch: Path, records: Mapping[str, Withdrawal]) -> None:
    """Replace the records of a store in one atomic move. `scratch` is a path on the same file system."""
    kept = {version: {k: v for k, v in asdict(one).items() if k != "version"} for version, one in records.items()}
    scratch.write_text(json.dumps(kept, indent=1) + "\n")
    rename_durably(scratch, root / FILE)


def refuse(records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str]) -> None:
    """Raise BundleWithdrawn where this version, or an identical one, is on record."""
    content = content_of(files)
    same = records.get(version) or next((one for one in records.values() if one.content == content), None)
    if same is not None:
        twin = "" if same.version == version else f"{version} is identical to {same.version}: "
        raise BundleWithdrawn(f"{twin}{same.describe()}; --force makes it live all the same")


def without(records: Mapping[str, Withdrawal], version: str, files: Mapping[str, str]) -> dict[str, Withdrawal]:
    """Return the records that are neither of this version nor of an identical one."""
    content = content_of(files)
    return {name: one for name, one in records.items() if name != version and one.content != content}
