"""Retry decisions: whether, when and how often a failed attempt is repeated."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace_client import CallOptions, TailraceError
from tailrace_client.retry import Attempts, RetryBudget, late

RETRIED = st.sampled_from(["unreachable", "unavailable", "overloaded"])


@given(
    st.lists(st.tuples(RETRIED, st.floats(0, 1), st.floats(0, 2), st.floats(0, 0.3)), max_size=30),
    st.integers(1, 3_000),
    st.integers(0, 12),
)
def test_attempts_end_before_the_deadline_and_within_the_budget(
    failures: list[tuple[str, float, float, float]], deadline_ms: int, reserve: int
) -> None:
    """For any sequence of failures, each attempt starts before the deadline, and the server's deadline never grows."""
    options = CallOptions(retry_reserve=reserve)
    attempts = Attempts(options, RetryBudget(options), deadline_ms, now_s=100.0)
    now_s, deadlines_ms = 100.0, []

    for code, chance, after_s, took_s in failures:
        assert now_s < 100 + deadline_ms / 1_000
        deadlines_ms.append(attempts.server_deadline_ms(now_s))
        now_s += took_s
        error = TailraceError(code, "no", retry_after_s=after_s)
        try:
            now_s += attempts.pause_s(error, chance, now_s)
        except TailraceError:
            break

    assert attempts.num >= len(deadlines_ms)
    assert attempts.num - 1 <= reserve
    assert deadlines_ms == sorted(deadlines_ms, reverse=True)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("unreachable", "^unreachable: no route; no answer came"),
        ("unavailable", "^deadline_exceeded: .*before: no route"),
    ],
)
def test_a_late_retry_says_why_the_attempt_before_failed(code: str, expected: str) -> None:
    """Over gRPC, as over REST, the error is `unreachable` if no connection was possible until the deadline."""
    attempts = Attempts(CallOptions(), RetryBudget(CallOptions()), deadline_ms=1_000, now_s=0.0)
    attempts.pause_s(TailraceError(code, "no route"), 0.5, 0.1)

    with pytest.raises(TailraceError, match=expected) as late_there:
        attempts.pause_s(late(), 0.5, 0.9)
    with pytest.raises(TailraceError, match=expected):
        attempts.left_s(1.0)
    with pytest.raises(TailraceError) as of_the_server:
        attempts.pause_s(TailraceError("deadline_exceeded", "features", request_id="r"), 0.5, 0.9)

    assert late_there.value.num_attempts == 2
    assert of_the_server.value.message == "features"


def test_a_thousand_failing_calls_add_a_tenth() -> None:
    """Of a thousand calls that always fail, only a tenth plus the reserve are sent again."""
    options = CallOptions()
    budget, num_sent = RetryBudget(options), 0

    for _ in range(1_000):
        attempts = Attempts(options, budget, 1e6, now_s=0.0)
        with suppress(TailraceError):
            while True:
                attempts.pause_s(TailraceError("unreachable", "no"), 0.5, 0.0)
        num_sent += attempts.num

    assert num_sent == pytest.approx(1_000 + 100 + 10, abs=1)


@pytest.mark.parametrize(
    ("code", "retry_after_s", "is_repeated"),
    [
        ("unreachable", None, True),
        ("unavailable", None, True),
        ("unavailable", 0.5, True),
        ("unavailable", 1.0, False),
        ("overloaded", 0.5, True),
        ("quota_exceeded", 0.5, True),
        ("quota_exceeded", 1.0, False),
        ("overloaded", None, False),
        *((code, None, False) for code in ("invalid_request", "unauthenticated", "deadline_exceeded", "internal")),
    ],
)
def test_which_errors_are_repeated(code: str, retry_after_s: float | None, is_repeated: bool) -> None:
    """Failed connections and `unavailable` are retried; rejections only if their retry time fits the deadline."""
    options = CallOptions()
    attempts = Attempts(options, RetryBudget(options), 1_000, now_s=0.0)
    error = TailraceError(code, "no", retry_after_s=retry_after_s)

    if is_repeated:
        assert attempts.pause_s(error, 0.5, 0.0) == pytest.approx((retry_after_s or 0) + 0.01)
    else:
        with pytest.raises(TailraceError) as raised:
            attempts.pause_s(error, 0.5, 0.0)
        assert raised.value is error
