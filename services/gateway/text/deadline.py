"""Enforces the deadline of a text: passes a writer's events on, and ends all open choices when the deadline passes.

Choices still open then end with DEADLINE; before the first token, DeadlineExceeded is raised instead. A hanging or
unreachable writer therefore blocks no caller.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest, TextWriter
from services.errors import DeadlineExceeded, DependencyUnavailable

_RETRY_AFTER_S = 1.0


async def in_time(
    writer: TextWriter, request: TextRequest, wall_clock: Callable[[], float], grace_s: float
) -> AsyncGenerator[TextEvent, None]:
    """Yield the writer's events; closing this closes them. `grace_s`: see TextLimits.

    The wall clock is read once, so that a step of it neither ends a text nor prolongs it.

    Raises the writer's errors, and DependencyUnavailable if its events end early.
    """
    open_choices = dict.fromkeys(range(request.n))
    so_far, end_s = NOTHING, None
    if request.deadline_unix_s is not None:
        end_s = asyncio.get_running_loop().time() + request.deadline_unix_s - wall_clock() + grace_s
    async with aclosing(_generator(writer.write(request))) as events:
        while (event := await _next(events, end_s)) is not None:
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


async def _next(events: AsyncIterator[TextEvent], end_s: float | None) -> TextEvent | None:
    """Return the next event; None once the event loop's clock has passed the end."""
    try:
        async with asyncio.timeout_at(end_s) as timer:
            return await _next_or_broken(events)
    except TimeoutError:
        if not timer.expired():
            raise
        return None


async def _next_or_broken(events: AsyncIterator[TextEvent]) -> TextEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise DependencyUnavailable("text", _RETRY_AFTER_S) from None


def _generator(events: AsyncIterator[TextEvent]) -> AsyncGenerator[TextEvent, None]:
    """Narrow the type: TextWriter guarantees that its iterator can be closed."""
    return cast("AsyncGenerator[TextEvent, None]", events)


NOTHING = TextDone(num_prompt_tokens=0, num_cached_tokens=0, num_completion_tokens=0)


def counted(so_far: TextDone, event: TextEvent) -> TextDone:
    """Return the count after this event; a writer's own TextDone overrides it."""
    match event:
        case TextBegan():
            return replace(so_far, num_prompt_tokens=event.num_prompt_tokens, num_cached_tokens=event.num_cached_tokens)
        case TextPiece():
            return replace(so_far, num_completion_tokens=so_far.num_completion_tokens + event.num_tokens)
        case TextDone():
            return event


def added(done: TextDone, other: TextDone) -> TextDone:
    """Return the summed count of two texts."""
    return TextDone(
        num_prompt_tokens=done.num_prompt_tokens + other.num_prompt_tokens,
        num_cached_tokens=done.num_cached_tokens + other.num_cached_tokens,
        num_completion_tokens=done.num_completion_tokens + other.num_completion_tokens,
    )
