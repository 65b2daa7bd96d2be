"""Everything that Tailrace refuses or fails at, as one small tree.

    TailraceError
    ├── NotFound              what was asked for by name is not there, or not any more
    ├── InvalidRequest        the caller's input is wrong: names the field and the fix
    │   └── ContextTooLong    prompt and text together do not fit the model's context
    ├── RequestTooLarge       the caller sent more bytes than a door accepts
    ├── Unauthenticated       no API key, or none that is valid now: never says which
    ├── NotAllowed            a valid key without the scope that this call needs
    ├── QuotaExceeded         the key's rate or quota is used up: carries when to come back
    ├── Overloaded            we could, but not now: carries when to come back
    ├── DependencyAway        a store or broker does not answer: carries when to come back
    ├── DeadlineExceeded      a stage ran out of the request's time
    ├── BundleError
    │   ├── BundleNotFound    no such version, or nothing published yet
    │   ├── BundleCorrupt     a file is missing or its hash differs from the manifest
    │   └── BundleMismatch    the request was planned for another version than the one loaded
    ├── CheckpointError       weights are missing, superfluous or of the wrong shape
    ├── ConfigError           a setting is unknown or its value is bad: names the key
    ├── DataError             an input table breaks its schema: names the column, shows an example
    ├── StageFailed           an offline stage cannot go on: names the stage
    └── EnvironmentFault      this machine lacks something: a free port, a binary, memory

No transport words here: each door maps this tree to its own codes, once.
"""

_MAX_FIELD_CHARS = 120


class TailraceError(Exception):
    """Base of all errors that this project raises on purpose."""


class NotFound(TailraceError):
    """What was asked for by name is not there, or not any more; `fix` says where to look."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


class InvalidRequest(TailraceError):
    """The caller's input is wrong; `field` says where, `fix` says what would be right.

    The name of an unknown field is the caller's own and may be as long as a body; it is cut, since errors are logged and kept.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        self.field = field if len(field) <= _MAX_FIELD_CHARS else f"{field[:_MAX_FIELD_CHARS]}…"
        super().__init__(f"{self.field}: {problem}; {fix}")
        self.problem = problem
        self.fix = fix


class ContextTooLong(InvalidRequest):
    """Prompt and text together do not fit the model's context: clients that know it send less of what was said before."""


class RequestTooLarge(TailraceError):
    """The request's body is over the door's limit."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"body: larger than {max_bytes} bytes; send less per request")
        self.field = "body"
        self.max_bytes = max_bytes


class Unauthenticated(TailraceError):
    """No API key, or none that is valid now. The same words for a missing, wrong or expired key: they help no attacker."""

    def __init__(self) -> None:
        super().__init__("this call needs a valid API key; send it as `authorization: Bearer KEY`")


class NotAllowed(TailraceError):
    """A valid key without the scope that this call needs. `key_id` is for the audit, not for the caller."""

    def __init__(self, scope: str, key_id: str) -> None:
        super().__init__(f"this key lacks the scope {scope}; ask whoever issued it")
        self.scope = scope
        self.key_id = key_id


class QuotaExceeded(TailraceError):
    """The key's rate or quota is used up; the caller may try again after `retry_after_s`."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(f"this key's {what} is used up; try again in {retry_after_s:g} s")
        self.what = what
        self.retry_after_s = retry_after_s


class Overloaded(TailraceError):
    """The queue is full; the caller may try again after `retry_after_s`."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(f"{what} is overloaded; try again in {retry_after_s:g} s")
        self.what = what
        self.retry_after_s = retry_after_s


class DependencyAway(TailraceError):
    """A dependency does not answer; nothing was done on the caller's behalf."""

    def __init__(self, dependency: str, retry_after_s: float) -> None:
        super().__init__(f"{dependency} is away; try again in {retry_after_s:g} s")
        self.dependency = dependency
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TailraceError):
    """A stage ran out of the request's time."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"{stage}: the deadline passed")
        self.stage = stage


class BundleError(TailraceError):
    """Something is wrong with a bundle."""


class BundleNotFound(BundleError):
    """No such bundle version, or none is live yet."""


class BundleCorrupt(BundleError):
    """A bundle's file is missing or does not match the manifest."""


class BundleMismatch(BundleError):
    """The request was planned for another bundle version than the one that is loaded."""

    def __init__(self, wanted: str, loaded: str) -> None:
        super().__init__(f"bundle {wanted} was asked for, {loaded} is loaded")
        self.wanted = wanted
        self.loaded = loaded


class CheckpointError(TailraceError):
    """A checkpoint folder lacks tensors, has unknown ones, or has them in the wrong shape."""


class ConfigError(TailraceError):
    """A setting is unknown or its value is bad; the message names the key."""


class DataError(TailraceError):
    """An input table breaks its schema; names the column and shows an example of what is expected."""

    def __init__(self, column: str, problem: str, example: str) -> None:
        super().__init__(f"column {column}: {problem}; expected for example {example}")
        self.column = column


class StageFailed(TailraceError):
    """An offline stage cannot go on."""

    def __init__(self, stage: str, why: str) -> None:
        super().__init__(f"stage {stage}: {why}")
        self.stage = stage


class EnvironmentFault(TailraceError):
    """This machine lacks something that is needed: a free port, a binary, memory."""
