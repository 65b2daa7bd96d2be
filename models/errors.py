"""The errors that models raise, and the base of all that Tailrace raises on purpose; `services/errors.py` draws the whole tree.

They lie here, beneath the services, because models import nothing of them. Knows no transport.
"""

from enum import StrEnum
from typing import ClassVar

_MAX_FIELD_CHARS = 120
_BUNDLE_RETRY_AFTER_S = 1.0


class ErrorKind(StrEnum):
    """The error codes that callers see, the same at every door."""

    INVALID_REQUEST = "invalid_request"
    TOO_LARGE = "request_too_large"
    UNAUTHENTICATED = "unauthenticated"
    NOT_ALLOWED = "not_allowed"
    NOT_FOUND = "not_found"
    QUOTA = "quota_exceeded"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    LATE = "deadline_exceeded"
    INTERNAL = "internal"


class TailraceError(Exception):
    """Base of all errors that this project raises on purpose.

    The attributes are what a caller may see; `str(error)` is for logs and operators. An error without a kind of its own is
    internal, and its `problem` reveals nothing.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    problem: str = "something broke on our side; it is logged"
    field: str | None = None
    """The field of the request that is wrong."""
    fix: str | None = None
    """What to send instead."""
    retry_after_s: float | None = None
    """When a retry may succeed."""

    @property
    def summary(self) -> str:
        """Field, problem and fix in one line."""
        problem = f"{self.field}: {self.problem}" if self.field else self.problem
        return f"{problem}; {self.fix}" if self.fix else problem

    @property
    def is_ours(self) -> bool:
        """Whether the fault is on the server's side."""
        return self.kind in {ErrorKind.UNAVAILABLE, ErrorKind.LATE, ErrorKind.INTERNAL}


class InvalidRequest(TailraceError):
    """The caller's input is wrong; `field` says where, `fix` says what would be right.

    The name of an unknown field is the caller's own and may be as long as a body; it is cut, since errors are logged and kept.
    """

    kind = ErrorKind.INVALID_REQUEST

    def __init__(self, field: str, problem: str, fix: str) -> None:
        self.field: str = field if len(field) <= _MAX_FIELD_CHARS else f"{field[:_MAX_FIELD_CHARS]}…"
        super().__init__(f"{self.field}: {problem}; {fix}")
        self.problem = problem
        self.fix: str = fix


class BundleError(TailraceError):
    """Something is wrong with a bundle."""

    kind = ErrorKind.UNAVAILABLE
    problem = "bundle is unavailable"
    retry_after_s = _BUNDLE_RETRY_AFTER_S


class BundleNotFound(BundleError):
    """No such bundle version, or none is live yet."""


class BundleCorrupt(BundleError):
    """A bundle's file is missing or does not match the manifest."""


class BundleIncomplete(BundleCorrupt):
    """A file of a bundle is missing."""


class BundleUntrained(BundleError):
    """A bundle that was made of items alone has no decoder and no student, which this needs."""

    def __init__(self, version: str) -> None:
        super().__init__(
            f"{version} was made of items alone and has no models yet; train them with `tailrace pipeline`"
        )


class BundleMoved(BundleError):
    """Another promotion was faster."""

    def __init__(self, expected: str | None, found: str | None) -> None:
        super().__init__(
            f"the live version is {found} and no longer {expected}, which was live when this command began; nothing was made live. "
            f"Look at {found}, then run the command again (a pipeline goes on from its finished stages)"
        )


class BundleWithdrawn(BundleError):
    """Somebody withdrew this version, or one with the same content; the message names who, when and why."""


class CanaryError(BundleError):
    """A release is under way where none may be, or none is where one must be; the message names it."""


class StoreUnavailable(BundleError):
    """The object store of bundles does not answer, or refuses; the message names it and why."""

    problem = "the store of bundles is unavailable"


class ConfigError(TailraceError):
    """A setting is unknown or its value is bad; the message names the key."""


class CheckpointError(TailraceError):
    """A checkpoint folder lacks tensors, has unknown ones, or has them in the wrong shape."""


class EnvironmentFault(TailraceError):
    """This machine lacks something that is needed: a free port, a binary, memory."""
