"""Which paths of requests can be read in one way only.

The edge counts, limits and repeats requests by the path as it was sent, the doors route by the decoded one. A path on which the two
could differ is refused at both, by one pattern: the edge would repeat `/v1/%65vents`, and the door record it twice.
"""

import re
from urllib.parse import unquote_to_bytes

from services.errors import InvalidRequest

WITH_PARAMETER = (
    *("/v1/models/", "/v1/explanations/", "/v1/items/", "/v1/users/", "/v1/erasures/"),
    "/console/page/",
)
"""What stands before a parameter. Only a parameter may be percent-encoded; it is decoded once, by the door."""
AMBIGUOUS = (
    r"//|/([.]|%2[Ee]){1,2}(?![^/])"  # empty segments, and dot segments, which may be encoded themselves (RFC 3986, 6.2.2)
    rf"|^(?!{'|'.join(WITH_PARAMETER)})[^%]*%|%(?![0-9A-Fa-f]{{2}})"
)
"""A pattern of Python and of HAProxy, for paths as they are sent: without a query, or the host of an absolute target."""
PATH_PROBLEM = "percent-encoded, or with an empty or a dot segment"
PATH_FIX = "send it as /docs writes it; only a parameter may be encoded, as UTF-8"

_AMBIGUOUS = re.compile(AMBIGUOUS.encode())


def check_path(path: bytes) -> None:
    """Raise InvalidRequest for a path that can be read in more than one way. `path` is as it was sent."""
    if _AMBIGUOUS.search(path) or not _is_utf8(unquote_to_bytes(path)):
        raise InvalidRequest("path", PATH_PROBLEM, PATH_FIX)


def _is_utf8(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True
