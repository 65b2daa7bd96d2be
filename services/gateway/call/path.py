"""Paths of requests: which are refused because they can be read in two ways, and how a path is matched with that of an operation.

Edge and doors both go by the path as it was sent, before it is decoded. A parameter is one segment, decoded after the match: a slash in it is
%2F, and a further segment makes another path. Both refuse paths that a server between them could rewrite, by one pattern: the edge would
repeat `/v1/%65vents`, and the door record it twice.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from services.errors import InvalidRequest

WITH_PARAMETER = (
    *("/v1/models/", "/v1/explanations/", "/v1/items/", "/v1/users/", "/v1/erasures/"),
    *("/console/page/", "/console/items/", "/console/erasures/", "/console/names/"),
)
"""The beginnings of paths with parameters. Only a parameter may be percent-encoded."""
AMBIGUOUS = (
    r"//|/([.]|%2[Ee]){1,2}(?![^/])"  # empty segments, and dot segments, which may be encoded themselves (RFC 3986, 6.2.2)
    rf"|^(?!{'|'.join(WITH_PARAMETER)})[^%]*%|%(?![0-9A-Fa-f]{{2}})"
)
"""A pattern of Python and of HAProxy, for paths as they are sent: without a query, or the host of an absolute target."""
OPENAI_NAMES = (
    *("assistants", "audio", "batches", "chat", "chatkit", "completions", "containers", "conversations", "edits"),
    *("embeddings", "engines", "evals", "files", "fine_tuning", "fine-tunes", "images", "models", "moderations"),
    *("organization", "projects", "realtime", "responses", "skills", "threads", "uploads", "vector_stores", "videos"),
)
"""Names behind /v1 in OpenAI's API. Few are offered here; OpenAI's clients read errors in its envelope only."""
PATH_PROBLEM = "percent-encoded, or with an empty or a dot segment"
PATH_FIX = "send it as /docs writes it; only a parameter may be encoded, as UTF-8"

_AMBIGUOUS = re.compile(AMBIGUOUS.encode())


def check_path(path: bytes) -> None:
    """Raise InvalidRequest for a path that can be read in more than one way. `path` is as it was sent."""
    if _AMBIGUOUS.search(path) or not _is_utf8(unquote_to_bytes(path)):
        raise InvalidRequest("path", PATH_PROBLEM, PATH_FIX)


def sent_path(connection: Mapping[str, Any]) -> bytes:
    """Return a request's path as it was sent. A server that does not keep it has decoded it: it is encoded again, and its slashes separate segments."""
    decoded = str(connection["path"]).encode(errors="surrogateescape")
    sent: bytes = connection.get("raw_path") or quote_from_bytes(decoded).encode()
    root = str(connection.get("root_path", "")).encode()
    return sent.removeprefix(root) if sent.startswith(root + b"/") else sent


def pattern_of(template: str) -> re.Pattern[bytes]:
    """Return the pattern of an operation's path such as `/v1/users/{user_id}/data`, for the path as it was sent."""
    segments = re.split(r"\{(\w+)\}", template)
    parts = (f"(?P<{part}>[^/]+)" if place % 2 else re.escape(part) for place, part in enumerate(segments))
    return re.compile("".join(parts).encode())


def parameters_of(found: re.Match[bytes]) -> dict[str, str]:
    """Return the parameters of a path that matched and that `check_path` has accepted, decoded."""
    return {name: unquote_to_bytes(sent).decode() for name, sent in found.groupdict().items()}


def _is_utf8(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True
