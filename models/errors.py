"""Base class of all intentional errors of Tailrace, and the errors of models.

The whole tree is drawn in `services/errors.py`.
They are defined here because models import nothing from the services. No knowledge of transports.
"""

from enum import StrEnum
from typing import ClassVar

_MAX_FIELD_CHARS = 120
_BUNDLE_RETRY_AFTER_S = 1.0


class ErrorKind(StrEnum):
    """The error codes that callers see, the same in every API."""

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
    """Base class of all errors that this project raises intentionally.

    The attributes are visible to callers; `str(error)` is for logs and operators. An error without a kind of its own is
    internal, and its `problem` reveals nothing.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    problem: str = "internal error; it is logged"
    field: str | None = None
    """The invalid field of the request."""
    fix: str | None = None
    """The value to send instead."""
    retry_after_s: float | None = None
    """Seconds after which a retry may succeed."""

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
    """Invalid input; `field` names the place, `fix` the valid input.

    The name of an unknown field comes from the caller and may be as long as a body; it is truncated, since errors are
    logged and kept.
    """

    kind = ErrorKind.INVALID_REQUEST

    def __init__(self, field: str, problem: str, fix: str) -> None:
        self.field: str = field if len(field) <= _MAX_FIELD_CHARS else f"{field[:_MAX_FIELD_CHARS]}…"
        super().__init__(f"{self.field}: {problem}; {fix}")
        self.problem = problem
        self.fix: str = fix


class BundleError(TailraceError):
    """Base class of bundle errors."""

    kind = ErrorKind.UNAVAILABLE
    problem = "bundle is unavailable"
    retry_after_s = _BUNDLE_RETRY_AFTER_S


class BundleNotFound(BundleError):
    """Unknown bundle version, or no live version yet."""


class BundleCorrupt(BundleError):
    """A file of a bundle is missing or does not match the manifest."""


class BundleIncomplete(BundleCorrupt):
    """A file of a bundle is missing."""


class BundleUntrained(BundleError):
    """An items-only bundle has no decoder and no student, which this operation needs."""

    def __init__(self, version: str) -> None:
        super().__init__(f"{version} was made of items only and has no models yet; train them with `tailrace pipeline`")


class BundleMoved(BundleError):
    """A concurrent promotion won."""

    def __init__(self, expected: str | None, live: str | None) -> None:
        super().__init__(
            f"the live version is {live} and no longer {expected}; nothing was promoted. Look at {live}, then run "
            "the command again (a pipeline reuses its finished stages)"
        )


class BundleWithdrawn(BundleError):
    """This version, or a version with the same content, was withdrawn; the message names who, when and why."""


class CanaryError(BundleError):
    """The release state forbids this operation; the message names the release."""


class StoreUnavailable(BundleError):
    """The object store of bundles is unreachable or refuses access; the message names the store and the reason."""

    problem = "the bundle store is unavailable"


class ConfigError(TailraceError):
    """Unknown setting or invalid value; the message names the key."""


class CheckpointError(TailraceError):
    """Missing, unknown or misshapen tensors in a checkpoint folder."""


class EnvironmentFault(TailraceError):
    """A required resource of this machine is missing: a free port, a binary, memory."""
