"""`python -m infra.api_page`: write docs/api.md; with --check only report whether it would change."""

import sys
from pathlib import Path

from infra.api_page.page import render

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"


def main() -> int:
    """Write the page when it differs; return 1 if --check finds that it does."""
    text = render(ROOT)
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("stale: docs/api.md; run `make docs`")  # noqa: T201 - what the caller asked for
        return 1
    PAGE.write_text(text)
    print("wrote docs/api.md")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
