"""Several prompts as one answer: their events in the order in which they come, choices numbered through, tokens summed.

Knows no JSON. Closing what `written` gives closes every writer's iterator.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from services.contracts.text import TextBegan, TextDone, TextEvent, TextPiece, TextRequest
from services.gateway.openai.answers import Choice
from services.gateway.openai.call import CompletionCall
from services.gateway.text.count import NOTHING, added, counted

Write = Callable[[TextRequest], AsyncGenerator[TextEvent, None]]

_MAX_WAITING = 64


async def written(asked: CompletionCall, write: Write) -> AsyncGenerator[TextEvent, None]:
    """Write every prompt. A TextBegan comes for each and counts all that began so far; one TextDone comes last."""
    began, done = NOTHING, NOTHING
    async with aclosing(_merged(asked, write)) as events:
        async for place, event in events:
            match event:
                case TextBegan():
                    began = added(began, counted(NOTHING, event))
                    yield TextBegan(
                        num_prompt_tokens=began.num_prompt_tokens, num_cached_tokens=began.num_cached_tokens
                    )
                case TextPiece():
                    yield replace(event, index=place * asked.n + event.index)
                case TextDone():
                    done = added(done, event)
    yield done


async def whole(asked: CompletionCall, write: Write) -> tuple[list[Choice], TextDone]:
    """Write every prompt to its end."""
    choices = [Choice() for _ in range(asked.num_choices)]
    done: TextDone | None = None
    async with aclosing(written(asked, write)) as events:
        async for event in events:
            if isinstance(event, TextPiece):
                choices[event.index].take(event)
            elif isinstance(event, TextDone):
                done = event
    assert done is not None, "a text ends with TextDone or with an error"
    return choices, done


async def _merged(asked: CompletionCall, write: Write) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Return the events of all prompts with the prompt's number. One prompt needs no task of its own."""
    if len(asked.requests) == 1:
        async with aclosing(write(asked.requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TextEvent | Exception | None]] = asyncio.Queue(_MAX_WAITING)
    tasks = [asyncio.create_task(_into(queue, place, write(request))) for place, request in enumerate(asked.requests)]
    try:
        num_open = len(tasks)
        while num_open:
            place, queued = await queue.get()
            if isinstance(queued, Exception):
                raise queued
            if queued is None:
                num_open -= 1
            else:
                yield place, queued
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _into(
    queue: "asyncio.Queue[tuple[int, TextEvent | Exception | None]]",
    place: int,
    events: AsyncGenerator[TextEvent, None],
) -> None:
    last: Exception | None = None
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put((place, event))
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
        last = error
    await queue.put((place, last))
