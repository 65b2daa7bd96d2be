"""The console's files, read once and served with an ETag and a strict content security policy. No build step.

One file is generated: the tiers and reasons in words, so that the page has the same sentences as the API page.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

from services.gateway.records.reasons import REASONS, TIERS

PAGE_DIR = Path(__file__).parent / "page"
INDEX = "index.html"
REASONS_FILE = "reasons.js"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file with its ETag."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, if_none_match: str | None) -> Response:
        """Return the file, or 304 when the caller has this version."""
        headers = {**HEADERS, "etag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def load_page(folder: Path = PAGE_DIR) -> Mapping[str, StaticFile]:
    """Return the page's files by name, the generated one included."""
    bodies = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}
    return {name: _static_file(name, body) for name, body in {**bodies, REASONS_FILE: _reasons_module()}.items()}


def _static_file(name: str, body: bytes) -> StaticFile:
    return StaticFile(body, _MEDIA_TYPES[Path(name).suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


def _reasons_module() -> bytes:
    """Return the table of tiers and reasons as a JavaScript module."""
    tiers = {tier.value: {"title": text.title, "meaning": text.meaning} for tier, text in TIERS.items()}
    reasons = {reason.value: text.meaning for reason, text in REASONS.items()}
    return f"export const TIER_TEXTS = {json.dumps(tiers)}\nexport const REASONS = {json.dumps(reasons)}\n".encode()
