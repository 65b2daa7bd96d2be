"""Every error that Tailrace raises on purpose, as one small tree.

Each error carries its kind and the details for the caller.

    TailraceError
    ├── NotFound              no such name, or it no longer exists
    ├── InvalidRequest        the caller's input is wrong: names the field and the fix
    │   └── ContextTooLong    prompt and completion together exceed the model's context
    ├── RequestTooLarge       the body exceeds the limit
    ├── Unauthenticated       missing or invalid API key: the message never says which
    ├── NotAllowed            a valid key without the scope that this call needs
    ├── RetryLater            says when a retry may succeed
    │   ├── QuotaExceeded     the key's rate or quota is used up
    │   ├── Overloaded        no capacity at the moment
    │   └── DependencyUnavailable    a store or broker does not answer, or refuses
    │       ├── ReaderBehind  this process has not read a topic's earlier records yet
    │       └── ReplicaOnly   the store's server became a replica in a failover
    ├── OwnershipLost         another process owns the partition, or the store lost writes
    ├── RowChanged            a row changed after it was read
    ├── DeadlineExceeded      a stage exceeded the request's deadline
    ├── SchemaViolated        a finished text violates its JSON schema
    ├── BundleError
    │   ├── BundleNotFound    no such version, or nothing published yet
    │   ├── BundleCorrupt     permanently bad content: a hash differs from the manifest, or parts do not fit
    │   │   └── BundleIncomplete  a file is missing and may still arrive
    │   ├── BundleUntrained   made from items only, without models
    │   ├── BundleMoved       the pointer moved to another version during this promotion
    │   ├── BundleWithdrawn   the version, or an identical version, was withdrawn: promoting it needs force
    │   ├── CanaryError       a release is already in progress, or no release is
    │   ├── StoreUnavailable  the object store does not answer, or refuses
    │   ├── BundleMismatch    the request was planned for a version that is not loaded
    │   └── ModelLoading      the model is not in memory yet; this request started or awaits its load
    ├── CheckpointError       weights are missing, superfluous or of the wrong shape
    ├── ConfigError           a setting is unknown or its value is bad: names the key
    ├── DataError             an input table breaks its schema: names the column, shows an example
    ├── StageFailed           an offline stage cannot continue: names the stage
    └── EnvironmentFault      this machine lacks a resource: a free port, a binary, memory

The models' errors are defined in `models/errors.py`; services import every error from here. Knows no transport: each
door has one table from kind to its own status.
"""

from collections.abc import Sequence
from pathlib import Path

from models.errors import (
    BundleCorrupt,
    BundleError,
    BundleIncomplete,
    BundleMoved,
    BundleNotFound,
    BundleUntrained,
    BundleWithdrawn,
    CanaryError,
    CheckpointError,
    ConfigError,
    EnvironmentFault,
    ErrorKind,
    InvalidRequest,
    StoreUnavailable,
    TailraceError,
)

__all__ = [
    "BundleCorrupt",
    "BundleError",
    "BundleIncomplete",
    "BundleMismatch",
    "BundleMoved",
    "BundleNotFound",
    "BundleUntrained",
    "BundleWithdrawn",
    "CanaryError",
    "CheckpointError",
    "ConfigError",
    "ContextTooLong",
    "DataError",
    "DeadlineExceeded",
    "DependencyUnavailable",
    "EnvironmentFault",
    "ErrorKind",
    "InvalidRequest",
    "InvalidToken",
    "ModelLoading",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "OwnershipLost",
    "QuotaExceeded",
    "ReaderBehind",
    "ReplicaOnly",
    "RequestTooLarge",
    "RetryLater",
    "RowChanged",
    "SchemaViolated",
    "StageFailed",
    "StoreUnavailable",
    "TailraceError",
    "Unauthenticated",
    "as_tailrace_error",
]


class NotFound(TailraceError):
    """No such name, or it no longer exists; `fix` says where to look."""

    kind = ErrorKind.NOT_FOUND

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem = problem
        self.fix: str = fix


class ContextTooLong(InvalidRequest):
    """Prompt and completion together exceed the model's context.

    OpenAI's clients catch it and shorten the conversation.
    """


class RequestTooLarge(TailraceError):
    """The request's body exceeds the door's limit."""

    kind = ErrorKind.TOO_LARGE
    field = "body"
    fix = "send a smaller request"

    def __init__(self, max_bytes: int) -> None:
        self.problem = f"larger than {max_bytes} bytes"
        super().__init__(self.summary)


class Unauthenticated(TailraceError):
    """Missing or invalid API key.

    Missing, wrong and expired keys get the same message, so it tells an attacker nothing.
    """

    kind = ErrorKind.UNAUTHENTICATED
    problem = "this call needs a valid API key; send it as `authorization: Bearer KEY`"

    def __init__(self) -> None:
        super().__init__(self.problem)


class InvalidToken(Unauthenticated):
    """A token of the OIDC issuer that is not accepted: names the claim."""

    def __init__(self, claim: str, problem: str, fix: str) -> None:
        self.problem = f"{claim}: {problem}; {fix}"
        TailraceError.__init__(self, self.problem)


class NotAllowed(TailraceError):
    """A valid key without the scope that this call needs. `key_id` is for the audit log, not for the caller."""

    kind = ErrorKind.NOT_ALLOWED

    def __init__(self, scope: str, key_id: str) -> None:
        self.problem = f"this key lacks the scope {scope}; ask its issuer for a key with it"
        super().__init__(self.problem)
        self.key_id = key_id


class TenantNotAllowed(NotAllowed):
    """A valid key of a tenant that is suspended, or that may not make this call."""

    def __init__(self, problem: str, key_id: str) -> None:
        TailraceError.__init__(self, problem)
        self.problem = problem
        self.key_id = key_id


class RetryLater(TailraceError):
    """A transient error; `retry_after_s` says when a retry may succeed."""

    def __init__(self, problem: str, retry_after_s: float) -> None:
        super().__init__(f"{problem}; try again in {retry_after_s:g} s")
        self.problem = problem
        self.retry_after_s: float = retry_after_s


class QuotaExceeded(RetryLater):
    """The key's rate or quota, named by `quota`, is used up."""

    kind = ErrorKind.QUOTA

    def __init__(self, quota: str, retry_after_s: float) -> None:
        super().__init__(f"this key's {quota} is used up", retry_after_s)


class Overloaded(RetryLater):
    """A service has no capacity at the moment."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, service: str, retry_after_s: float) -> None:
        super().__init__(f"{service} is overloaded", retry_after_s)


class DependencyUnavailable(RetryLater):
    """A dependency does not answer, or refuses; the request had no effect. `why` is for logs: callers see `problem`."""

    kind = ErrorKind.UNAVAILABLE

    def __init__(self, dependency: str, retry_after_s: float, why: str = "") -> None:
        super().__init__(f"{dependency} is unavailable", retry_after_s)
        self.why = why

    def __str__(self) -> str:
        return f"{self.problem}: {self.why}" if self.why else super().__str__()


class ReaderBehind(DependencyUnavailable):
    """This process has not read a topic's earlier records yet."""

    def __init__(self, topic: str, num_left: int, retry_after_s: float) -> None:
        RetryLater.__init__(self, f"{topic}: {num_left} earlier records are not read yet", retry_after_s)
        self.why = ""


class ReplicaOnly(DependencyUnavailable):
    """The store's server became a replica in a failover: it rejects writes, and its reads may be stale."""


class OwnershipLost(TailraceError):
    """The store refused a write: this process lost the partition, or the store is not at the last written position."""

    def __init__(self, partition: int, why: str) -> None:
        super().__init__(f"partition {partition}: {why}; claim it again")


class RowChanged(TailraceError):
    """A row changed after it was read, and the write was rejected. Read it again."""


class DeadlineExceeded(TailraceError):
    """A stage exceeded the request's deadline."""

    kind = ErrorKind.LATE

    def __init__(self, stage: str) -> None:
        self.problem = f"{stage}: the deadline passed"
        super().__init__(self.problem)


class SchemaViolated(TailraceError):
    """A finished text violates its JSON schema: a bug in the grammar, not in the request."""

    def __init__(self, violation: str) -> None:
        self.problem = f"the text breaks its JSON schema at {violation}"
        super().__init__(self.problem)
        self.violation = violation


class BundleMismatch(BundleError):
    """The request was planned for a bundle version that is not the loaded version."""

    def __init__(self, wanted: str, loaded: str) -> None:
        super().__init__(f"bundle {wanted} was asked for, {loaded} is loaded")
        self.wanted = wanted
        self.loaded = loaded


class ModelLoading(BundleError):
    """A model is not in the memory of this process; its load was started, if it was not before."""

    def __init__(self, name: str) -> None:
        super().__init__(f"model {name} is loading")
        self.name = name


class DataError(TailraceError):
    """An input table breaks its schema; names the column, if any, and shows an example of valid input.

    `path` is set if the file as a whole is wrong, whose option the command line then names.
    """

    def __init__(self, column: str, problem: str, example: str, path: Path | None = None) -> None:
        where = f"column {column}: " if column else ""
        super().__init__(f"{where}{problem}; expected for example {example}")
        self.column, self.problem = column, problem
        self.path = path


class StageFailed(TailraceError):
    """An offline stage cannot continue. `advice` has a sentence for each possible next step."""

    def __init__(self, stage: str, why: str, advice: Sequence[str] = ()) -> None:
        super().__init__(f"stage {stage}: {why}")
        self.advice = advice


def as_tailrace_error(error: Exception) -> TailraceError:
    """Return a TailraceError as it is, and any other error as an internal error: its text may hold secrets."""
    return error if isinstance(error, TailraceError) else TailraceError()
