"""`python -m infra.chart`: generate the Helm chart from the overlays; with --check only list what would change."""

import sys
from pathlib import Path

from infra.chart.files import generated

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Write and list the files that differ. Return 1 if --check finds a difference."""
    stale = {
        path: text
        for path, text in generated().items()
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    }
    is_check = "--check" in sys.argv[1:]
    for path, text in stale.items():
        print(("stale: " if is_check else "wrote ") + path)  # noqa: T201 - what the caller asked for
        if not is_check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
