"""Request paths: rejects ambiguous paths, and matches a path with an operation's.

Edge and doors both use the path as it was sent, before decoding. A parameter is one segment, decoded after the match: a
slash in it is %2F, and an additional segment makes another path. Only a `model_id` may have more: OpenAI's clients send
`org/name` as it is. Both reject, by the same pattern, paths that a server
between them could rewrite; otherwise the edge could retry `/v1/%65vents` and the door would record it twice.
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
"""Prefixes of paths with parameters. Only a parameter may be percent-encoded."""
AMBIGUOUS = (
    r"//|/([.]|%2[Ee]){1,2}(?![^/])"  # empty segments, and dot segments, which may be encoded (RFC 3986, 6.2.2)
    rf"|^(?!{'|'.join(WITH_PARAMETER)})[^%]*%|%(?![0-9A-Fa-f]{{2}})"
)
"""Pattern for Python and HAProxy, over paths as sent: without the query, and without the host of an absolute target."""
OPENAI_NAMES = (
    *("assistants", "audio", "batches", "chat", "chatkit", "completions", "containers", "conversations", "edits"),
    *("embeddings", "engines", "evals", "files", "fine_tuning", "fine-tunes", "images", "models", "moderations"),
    *("organization", "projects", "realtime", "responses", "skills", "threads", "uploads", "vector_stores", "videos"),
)
"""Names under /v1 in OpenAI's API. Few are offered here; OpenAI's clients only understand errors in its envelope."""
PATH_PROBLEM = "percent-encoded, or with an empty or a dot segment"
PATH_FIX = "send it as /docs writes it; only a parameter may be encoded, as UTF-8"

_AMBIGUOUS = re.compile(AMBIGUOUS.encode())


def check_path(path: bytes) -> None:
    """Raise InvalidRequest for an ambiguous path. `path` is as it was sent."""
    if _AMBIGUOUS.search(path) or not _is_utf8(unquote_to_bytes(path)):
        raise InvalidRequest("path", PATH_PROBLEM, PATH_FIX)


def sent_path(connection: Mapping[str, Any]) -> bytes:
    """Return a request's path as it was sent.

    If the server kept only the decoded path, it is encoded again, and its slashes separate segments.
    """
    decoded = str(connection["path"]).encode(errors="surrogateescape")
    sent: bytes = connection.get("raw_path") or quote_from_bytes(decoded).encode()
    root = str(connection.get("root_path", "")).encode()
    return sent.removeprefix(root) if sent.startswith(root + b"/") else sent


def pattern_of(template: str) -> re.Pattern[bytes]:
    """Return the pattern of an operation's path such as `/v1/users/{user_id}/data`, for the path as it was sent."""
    segments = re.split(r"\{(\w+)\}", template)
    parts = (f"(?P<{part}>{_form(part)})" if index % 2 else re.escape(part) for index, part in enumerate(segments))
    return re.compile("".join(parts).encode())


def _form(parameter: str) -> str:
    return ".+" if parameter == "model_id" else "[^/]+"


def parameters_of(match: re.Match[bytes]) -> dict[str, str]:
    """Return the decoded parameters of a matched path that `check_path` has accepted."""
    return {name: unquote_to_bytes(sent).decode() for name, sent in match.groupdict().items()}


def _is_utf8(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True
