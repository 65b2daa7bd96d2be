"""Guards a call, at every door alike: authenticates, counts its rate, answers, and audits. No stack trace leaves it.

Knows neither HTTP nor gRPC: a door passes its handler, and a function that formats an error as its answer.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import structlog

from services.errors import ErrorKind, NotAllowed, TailraceError, as_tailrace_error
from services.gateway.call.headers import Call
from services.gateway.call.operation import Operation
from services.observability.tracing import note_failure

log = structlog.get_logger()

_NOBODY = "unauthenticated"
T = TypeVar("T")

OnError = Callable[[Call, str, str, str], None]
"""Called with the call, the door, the error code and its summary."""


class Access(Protocol):
    """Decides whether a call is admitted; every door calls it first."""

    async def authorize(self, call: Call, headers: Mapping[str, str], operation: Operation) -> None:
        """Set the call's caller, and count the call. Waits for a few milliseconds at most.

        Raises Unauthenticated, NotAllowed, QuotaExceeded or DependencyUnavailable.
        """
        ...

    @property
    def degraded(self) -> tuple[str, ...]:
        """The degraded modes of authorization, for readiness; the metrics report the same."""
        ...

    async def start(self) -> None:
        """Start following the keys and sharing the counts. Call in the serving loop."""
        ...

    async def stop(self) -> None: ...


class Gone(Exception):
    """The caller disconnected before the answer."""


async def guard(
    call: Call,
    admit: Callable[[], Awaitable[None]],
    handler: Callable[[], Awaitable[T]],
    refuse: Callable[[TailraceError], T],
    *,
    door: str,
    act: str | None,
    origin: Callable[[], str],
    on_error: OnError | None = None,
) -> T:
    """Admit the caller, call the handler, and answer any error.

    Args:
        call: The call; its body is not read before the caller is admitted.
        admit: Sets the call's request id and caller, or raises.
        handler: Answers the admitted call; raises Gone if the caller disconnected.
        refuse: Formats an error as an answer.
        door: The door's name in logs and metrics.
        act: The call's name in the audit line; None: no audit line.
        origin: Returns the caller's address.
        on_error: Called for each error.
    """
    who, outcome = _NOBODY, "gone"
    try:
        await admit()
        who = call.admitted.key_id
        answer = await handler()
        outcome = "ok"
    except Gone:
        raise
    except Exception as error:
        failure = as_tailrace_error(error)
        outcome = failure.kind.value
        if isinstance(failure, NotAllowed):
            who = failure.key_id
        elif call.caller is not None:
            who = call.caller.key_id
        note_failure(outcome, is_ours=failure.is_ours)
        if failure.kind is ErrorKind.INTERNAL:
            log.exception("unexpected_error", request_id=call.request_id, door=door)
        if on_error is not None:
            on_error(call, door, outcome, failure.summary)
        answer = refuse(failure)
    finally:  # a disconnect cancels the work but does not undo it
        if act is not None:
            log.warning("audit", act=act, who=who, origin=origin(), outcome=outcome, request_id=call.request_id)
    return answer
