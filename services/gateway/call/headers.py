"""What a caller says beside the request itself, in HTTP headers or gRPC metadata: `x-request-id` and `x-deadline-ms`."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.access import Caller
from services.contracts.recommend import check_id
from services.errors import InvalidRequest

REQUEST_ID = "x-request-id"
DEADLINE_MS = "x-deadline-ms"

_MAX_DIGITS = 9


@dataclass(slots=True)
class Call:
    """One call at a door. Its id is the newest that is known: made at arrival, then the header's, then the body's.

    `caller` is None until the door has let the caller in.
    """

    request_id: str
    caller: Caller | None = None

    @property
    def admitted(self) -> Caller:
        """The caller, once let in."""
        assert self.caller is not None, "work is done for those who were let in"
        return self.caller

    @property
    def echo(self) -> dict[str, str]:
        """The header or trailer that gives the id back; none when the id does not fit in one."""
        return {REQUEST_ID: self.request_id} if self.request_id.isascii() else {}


def request_id_from(headers: Mapping[str, str]) -> str:
    """Return the caller's request id, or a new one. Raises InvalidRequest. Header names are lower case."""
    request_id = headers.get(REQUEST_ID)
    if request_id is None:
        return new_request_id()
    check_id(REQUEST_ID, request_id)
    return request_id


def deadline_ms_from(headers: Mapping[str, str]) -> int | None:
    """Return the caller's deadline in milliseconds from arrival, if one is named. Raises InvalidRequest."""
    text = headers.get(DEADLINE_MS)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(DEADLINE_MS, "not a whole number of milliseconds", "send for example 200")
    return int(text)


def new_request_id() -> str:
    """Make an id for a request that came without one."""
    return uuid.uuid4().hex
