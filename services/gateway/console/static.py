"""The console's files: read once, served with an ETag and headers that let nothing from elsewhere in. No build step.

Knows nothing of what the page does.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

PAGE_DIR = Path(__file__).parent / "page"
INDEX = "index.html"
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
    """One file, ready to be sent."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, if_none_match: str | None) -> Response:
        """Return the file, or 304 when the caller has this very version."""
        headers = {**HEADERS, "etag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def load_page(folder: Path = PAGE_DIR) -> Mapping[str, StaticFile]:
    """Read the page's files, by name."""
    return {path.name: _load(path) for path in sorted(folder.iterdir()) if path.suffix in _MEDIA_TYPES}


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')
