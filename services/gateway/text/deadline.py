"""A text within its time: a writer's events, and when the deadline is over, an end to all that is still open.

After the deadline, choices that have not ended end with DEADLINE; where nothing was written yet, DeadlineExceeded is raised. So a
writer that is stuck or out of reach holds nobody.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

from services.contracts.text import FinishReason, TextDone, TextEvent, TextPiece, TextRequest, TextWriter
from services.errors import DeadlineExceeded, DependencyAway
from services.gateway.text.count import NOTHING, counted

GRACE_S = 0.5
"""How long after the deadline a writer may still say itself that it was late."""
_RETRY_AFTER_S = 1.0


async def in_time(
    writer: TextWriter, request: TextRequest, wall_clock: Callable[[], float]
) -> AsyncGenerator[TextEvent, None]:
    """Write. Closing this closes the writer's events. Raises what the writer raises, DependencyAway where it just stops."""
    open_choices = dict.fromkeys(range(request.n))
    so_far = NOTHING
    async with aclosing(_generator(writer.write(request))) as events:
        while (event := await _next(events, request, wall_clock)) is not None:
            so_far = counted(so_far, event)
            if isinstance(event, TextPiece) and event.finish_reason is not None:
                open_choices.pop(event.index, None)
            yield event
            if isinstance(event, TextDone):
                return
    if not so_far.num_completion_tokens:
        raise DeadlineExceeded("text")
    for index in open_choices:
        yield TextPiece(index=index, text="", num_tokens=0, finish_reason=FinishReason.DEADLINE)
    yield so_far


async def _next(
    events: AsyncIterator[TextEvent], request: TextRequest, wall_clock: Callable[[], float]
) -> TextEvent | None:
    """Return the next event; None when the deadline is over."""
    if request.deadline_unix_s is None:
        return await _next_or_broken(events)
    left_s = request.deadline_unix_s - wall_clock() + GRACE_S
    try:
        async with asyncio.timeout(max(0.0, left_s)) as timer:
            return await _next_or_broken(events)
    except TimeoutError:
        if not timer.expired():
            raise
        return None


async def _next_or_broken(events: AsyncIterator[TextEvent]) -> TextEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise DependencyAway("text", _RETRY_AFTER_S) from None


def _generator(events: AsyncIterator[TextEvent]) -> AsyncGenerator[TextEvent, None]:
    """Say that the writer's iterator can be closed, which TextWriter promises."""
    return cast("AsyncGenerator[TextEvent, None]", events)
