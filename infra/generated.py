"""Writes generated files, or only lists changes; the form of generated YAML."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

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


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml comes without types
    """Writes repeated values in full, and longer texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: write no aliases."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def plain_yaml(content: Any, width: int = 100_000) -> str:
    """Return the content as YAML, its keys in their order."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=width, allow_unicode=True)
    return text
