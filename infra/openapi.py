"""`python -m infra.openapi`: write docs/openapi.json for client generators; --check only reports a difference."""

import json
import sys
from pathlib import Path
from typing import Any

from services.gateway.data_plane import DataPlane
from services.gateway.rest.door import create_rest_app
from services.settings.settings import Settings

PATH = Path(__file__).resolve().parents[1] / "docs/openapi.json"


def document() -> dict[str, Any]:
    """Return the document that a gateway serves as /openapi.json."""
    return create_rest_app(_no_plane, lambda: b"", Settings.model_construct().max_body_bytes).openapi()


def main() -> int:
    """Write the document if it differs; with --check, return 1 instead."""
    text = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    if PATH.exists() and PATH.read_text() == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("stale: docs/openapi.json; run `make docs`")  # noqa: T201 - what the caller asked for
        return 1
    PATH.write_text(text)
    print("wrote docs/openapi.json")  # noqa: T201
    return 0


def _no_plane() -> DataPlane:
    raise NotImplementedError("the OpenAPI document needs no answers")


if __name__ == "__main__":
    sys.exit(main())
