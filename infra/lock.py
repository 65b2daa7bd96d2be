"""Print the lock: every installed distribution but this project, pinned, without a build's local suffix.

`python -m infra.lock > requirements.lock`. The local suffix names one build of a version (a CPU build, say); the same
pin without it takes the build that fits the machine.
"""

import sys
from importlib.metadata import distributions

_HEADER = "# Everything, pinned. Written by `make lock` from pyproject.toml; do not edit.\n"
_LEFT_OUT = {"tailrace", "pip"}


def locked_lines(installed: dict[str, str]) -> list[str]:
    """Return one pin per distribution, by name."""
    kept = {name.lower().replace("_", "-"): version for name, version in installed.items()}
    return [f"{name}=={kept[name].partition('+')[0]}" for name in sorted(kept.keys() - _LEFT_OUT)]


def main() -> None:
    """Write the lock of this interpreter's environment to stdout."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    sys.stdout.write(_HEADER + "\n".join(locked_lines(installed)) + "\n")


if __name__ == "__main__":
    main()
