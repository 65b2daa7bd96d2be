"""What each error code means to a caller. A code without a text fails the test of the page."""

from collections.abc import Mapping

from services.errors import ErrorKind

ERRORS: Mapping[ErrorKind, str] = {
    ErrorKind.INVALID_REQUEST: "a field is wrong: `field` names it, `fix` says what to send",
    ErrorKind.TOO_LARGE: "the body is larger than the door takes",
    ErrorKind.UNAUTHENTICATED: "no API key, or none that is valid now",
    ErrorKind.NOT_ALLOWED: "the key lacks the scope that the call needs",
    ErrorKind.NOT_FOUND: "what was asked for is not kept",
    ErrorKind.QUOTA: "the key's rate or quota is used up; come back after `retry-after`",
    ErrorKind.OVERLOADED: "we could, but not now; come back after `retry-after`",
    ErrorKind.AWAY: "a dependency is away and nothing was done; come back after `retry-after`",
    ErrorKind.LATE: "a stage ran out of time",
    ErrorKind.INTERNAL: "something broke on our side; it is logged under the request id",
}
