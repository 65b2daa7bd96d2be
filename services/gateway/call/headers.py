"""Headers (HTTP) or metadata (gRPC) that every door reads: `x-request-id`, `x-deadline-ms`, and the edge's headers."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.contracts.access import Caller, Priority
from services.contracts.message import check_id
from services.errors import InvalidRequest
from services.gateway.overload.edge_limit import EdgeMark
from services.peer import DEADLINE_MS

REQUEST_ID = "x-request-id"
EDGE_ARRIVED_MS, EDGE_IN_FLIGHT, EDGE_NAME = "x-edge-arrived-ms", "x-edge-in-flight", "x-edge-name"
EDGE_REFUSED = "x-edge-refused"
BATCH_SIZE = "x-batch-size"
"""Number of requests in a call, for the edge's count; without it the edge assumes the maximum."""
EDGE_LIMIT = "x-edge-limit"
"""The edge's clock and count on a request, and the gateway's limit on an answer; the edge strips all of them from
callers' traffic."""

_MAX_DIGITS = 9
_MAX_MARK_DIGITS = 15
_MAX_NAME_LEN = 64


def retry_after(seconds: float) -> str:
    """Format a retry delay as both doors and the edge do: in whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))


class Meter(Protocol):
    """Counts one call against the limits of its key."""

    @property
    def max_cost(self) -> int:
        """Maximum number of calls that the key's limits can admit at once."""
        ...

    def headers(self) -> Mapping[str, str]:
        """Return the headers with the limits and the remaining allowance."""
        ...

    async def charge(self, num_more: int) -> None:
        """Count the call as `num_more` additional calls. Raises QuotaExceeded; the call then uses no quota at all."""
        ...


@dataclass(slots=True)
class Call:
    """One call at a door.

    `request_id` is generated at arrival, then replaced by the header's, then by the body's. `caller` is None until the
    key is known, also if the call is refused later, `meter` is None for a key without limits.
    """

    request_id: str
    caller: Caller | None = None
    meter: Meter | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)

    @property
    def tenant(self) -> str | None:
        """The caller's tenant; None for an unknown caller."""
        return None if self.caller is None else self.caller.tenant

    @property
    def limits(self) -> Mapping[str, str]:
        """The headers or trailers with the key's remaining allowance; empty without limits."""
        return {} if self.meter is None else self.meter.headers()

    @property
    def admitted(self) -> Caller:
        """The caller of an authorized call."""
        assert self.caller is not None, "the call is authorized before its handler runs"
        return self.caller

    async def charge(self, num_calls: int, field: str, what: str) -> None:
        """Count the call as `num_calls` calls.

        Raises QuotaExceeded, or InvalidRequest naming the field of `what` if the key's limits can never admit that
        many.
        """
        if self.meter is None or num_calls == 1:
            return
        if num_calls > self.meter.max_cost:
            problem = f"{num_calls} {what} count as that many calls, more than this key's limits ever allow"
            raise InvalidRequest(field, problem, f"send at most {self.meter.max_cost} at once")
        await self.meter.charge(num_calls - 1)

    @property
    def echo(self) -> dict[str, str]:
        """The header or trailer that returns the id; empty if the id is not ASCII."""
        return {REQUEST_ID: self.request_id} if self.request_id.isascii() else {}


def request_id_from(request_id: str | None) -> str:
    """Return the caller's request id, or a new id without the header. Raises InvalidRequest."""
    if request_id is None:
        return new_request_id()
    check_id(REQUEST_ID, request_id)
    return request_id


def deadline_ms_from(headers: Mapping[str, str], at_most: int) -> int | None:
    """Return the caller's deadline in milliseconds from arrival, or None. Raises InvalidRequest naming the header."""
    text = headers.get(DEADLINE_MS)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(DEADLINE_MS, "not a whole number of milliseconds", "send for example 200")
    deadline_ms = int(text)
    if not 1 <= deadline_ms <= at_most:
        raise InvalidRequest(DEADLINE_MS, f"{deadline_ms} is out of range", f"send 1 to {at_most}")
    return deadline_ms


def batch_size_from(headers: Mapping[str, str]) -> int | None:
    """Return the declared number of requests in a call, or None. Raises InvalidRequest."""
    text = headers.get(BATCH_SIZE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(BATCH_SIZE, "not a whole number", "send the number of requests, for example 20")
    return int(text)


def edge_mark_from(headers: Mapping[str, str]) -> EdgeMark | None:
    """Return the edge's mark; None if the request did not come through the edge."""
    stamp_ms, num_in_flight = headers.get(EDGE_ARRIVED_MS, ""), headers.get(EDGE_IN_FLIGHT, "")
    if not (_is_count(stamp_ms) and _is_count(num_in_flight)):
        return None
    refused = Priority.__members__.get(headers.get(EDGE_REFUSED, "").upper())
    return EdgeMark(int(stamp_ms), int(num_in_flight), headers.get(EDGE_NAME, "")[:_MAX_NAME_LEN], refused)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_MARK_DIGITS


def new_request_id() -> str:
    return secrets.token_hex(16)
