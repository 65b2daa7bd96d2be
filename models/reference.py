"""The record of the reference: the bundle below which trainings may not fall by steps, set by which person and when. One JSON file beside the pointers. No torch.

The live bundle is another one each night, so a loss that each night's gate allows adds up; the reference stays until a person moves it. Knows no lock: the store
writes under its own.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.errors import BundleCorrupt
from models.files import rename_durably

FILE = "REFERENCE"
_UNREADABLE = "no record of a reference; remove it, and `tailrace bundles reference VERSION` sets one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The version, who set it, and when (UTC, ISO 8601); the last two are None where nobody did."""

    version: str
    by: str | None = None
    at: str | None = None

    def describe(self) -> str:
        """Return a sentence on which version it is, and why."""
        why = f"set by {self.by} at {self.at}" if self.by else "the first whole training that is kept"
        return f"{self.version} is the reference, {why}"


def read_reference(root: Path) -> Reference | None:
    """Return what a person set in this store; None where nobody did. Raises BundleCorrupt."""
    path = root / FILE
    try:
        found = Reference(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise BundleCorrupt(f"{path}: {_UNREADABLE}") from error
    if not all(isinstance(text, str) for text in asdict(found).values()):
        raise BundleCorrupt(f"{path}: {_UNREADABLE}")
    return found


def write_reference(root: Path, scratch: Path, reference: Reference) -> None:
    """Replace the record of a store in one atomic move. `scratch` is a path on the same file system."""
    scratch.write_text(json.dumps(asdict(reference), indent=1) + "\n")
    rename_durably(scratch, root / FILE)
