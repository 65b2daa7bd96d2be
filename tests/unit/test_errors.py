"""The error tree: each kind has a status in every protocol, and internal messages do not reach a caller."""

import pytest

from services import errors
from services.errors import ErrorKind, as_tailrace_error
from services.gateway.call.operations import REST_ERRORS
from services.gateway.grpc import answers as rpc_answers
from services.gateway.openai.operations import OPENAI_ERRORS


def test_every_kind_has_a_status_at_each_door() -> None:
    """The status tables of REST, OpenAI and gRPC are complete."""
    assert set(REST_ERRORS.status) == set(OPENAI_ERRORS.status) == set(rpc_answers.STATUS) == set(ErrorKind)


@pytest.mark.parametrize(
    ("error", "kind", "field", "retry_after_s"),
    [
        (errors.InvalidRequest("k", "bad", "mend"), ErrorKind.INVALID_REQUEST, "k", None),
        (errors.ContextTooLong("prompt", "bad", "mend"), ErrorKind.INVALID_REQUEST, "prompt", None),
        (errors.RequestTooLarge(10), ErrorKind.TOO_LARGE, "body", None),
        (errors.Overloaded("llm", 2.0), ErrorKind.OVERLOADED, None, 2.0),
        (errors.DependencyUnavailable("events", 3.0), ErrorKind.UNAVAILABLE, None, 3.0),
        (errors.BundleNotFound("none"), ErrorKind.UNAVAILABLE, None, 1.0),
        (errors.BundleMismatch("a", "b"), ErrorKind.UNAVAILABLE, None, 1.0),
        (errors.DeadlineExceeded("llm"), ErrorKind.LATE, None, None),
        (errors.ConfigError("secret"), ErrorKind.INTERNAL, None, None),
        (errors.BundleCorrupt("secret"), ErrorKind.UNAVAILABLE, None, 1.0),
        (ZeroDivisionError("secret"), ErrorKind.INTERNAL, None, None),
    ],
)
def test_each_error_has_its_kind_field_and_retry_time(
    error: Exception, kind: ErrorKind, field: str | None, retry_after_s: float | None
) -> None:
    """Errors that the caller can fix name a field, retryable errors have a retry time, and internal text is hidden."""
    answer = as_tailrace_error(error)

    assert (answer.kind, answer.field, answer.retry_after_s) == (kind, field, retry_after_s)
    assert "secret" not in answer.summary
