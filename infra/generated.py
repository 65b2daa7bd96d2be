"""Writes generated files, or only lists changes."""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_stale(files: Mapping[str, str]) -> int:
    """Write the files that differ and list them, by path below the repository's root.

    With --check on the command line, only compare; return 1 if a file differs.
    """
    stale = {
        path: text for path, text in files.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    }
    is_check = "--check" in sys.argv[1:]
    for path, text in stale.items():
        print(("stale: " if is_check else "wrote ") + path)  # noqa: T201 - what the caller asked for
        if not is_check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    return 1 if is_check and stale else 0
