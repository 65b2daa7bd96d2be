"""Generate the text of a call and answer it, whole or as a stream of chunks.

An error within a stream is its last event. Several prompts share one answer: their events are sent as they are
generated, choices are numbered consecutively, tokens are summed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.contracts.text import TextBegan, TextDone, TextEvent, TextPiece, TextRequest
from services.errors import ErrorKind, as_tailrace_error
from services.gateway.call.http import json_response
from services.gateway.openai.chunks import AnswerFormat, Choice, Json, usage_of
from services.gateway.openai.operations import error_json
from services.gateway.openai.parse import CompletionCall
from services.gateway.openai.streaming import DONE, EventStream, PrefetchedStream, sse, unless_disconnected
from services.gateway.text.deadline import NOTHING, added, counted
from services.gateway.text.metrics import CANCELLED, OK, TextReport

log = structlog.get_logger()

_MAX_QUEUED = 64

Generate = Callable[[TextRequest], AsyncGenerator[TextEvent, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResponder:
    """Answers one call. `route` is the metrics' label; a stream sends something at least every `silence_s` seconds."""

    route: str
    request_id: str
    call: CompletionCall
    format: AnswerFormat
    generate: Generate
    report: TextReport
    silence_s: float

    async def answer(self, http: Request) -> Response:
        """Return the answer. Raises generation errors before the first event, and ClientDisconnect."""
        try:
            return await (self._stream(http) if self.call.stream else self._whole(http))
        except ClientDisconnect:
            self.report.ended(self.route, CANCELLED, self.request_id)
            raise

    async def _whole(self, http: Request) -> Response:
        choices, done = await unless_disconnected(http, generate_whole(self.call, self.generate))
        self.report.ended(self.route, OK, self.request_id)
        return json_response(self.format.whole(choices, usage_of(done)))

    async def _stream(self, http: Request) -> Response:
        """Return the stream. An error before the first event, and within `silence_s`, still has its own HTTP status."""
        events = PrefetchedStream(generate_all(self.call, self.generate))
        await events.wait_first(http, self.silence_s)
        return EventStream(self._chunks(events), events, self.silence_s)

    async def _chunks(self, events: PrefetchedStream[TextEvent]) -> AsyncGenerator[str, None]:
        code, call = CANCELLED, self.call
        try:
            async with aclosing(events):
                so_far = counted(NOTHING, await anext(events))
                for chunk in self.format.opening(call.num_choices):
                    yield sse(_with_usage(chunk, call, so_far))
                async for event in events:
                    so_far = counted(so_far, event)
                    if isinstance(event, TextPiece):
                        yield sse(_with_usage(self.format.chunk(event), call, so_far))
                if call.include_usage:
                    yield sse(self.format.usage_chunk(usage_of(so_far)))
                code = OK
                yield DONE
        except Exception as error:  # the status is sent already: the error is the stream's last event
            answer = as_tailrace_error(error)
            code = answer.kind.value
            if answer.kind is ErrorKind.INTERNAL:
                log.exception("unexpected_error", request_id=self.request_id, door="openai")
            yield sse(error_json(answer))
        finally:
            self.report.ended(self.route, code, self.request_id)


def _with_usage(chunk: Json, call: CompletionCall, so_far: TextDone) -> Json:
    """Add the chunk's `usage`: with include_usage the field is null in all chunks but the last."""
    if call.continuous_usage:
        return {**chunk, "usage": usage_of(so_far)}
    return {**chunk, "usage": None} if call.include_usage else chunk


async def generate_whole(call: CompletionCall, generate: Generate) -> tuple[list[Choice], TextDone]:
    """Return all choices and the tokens used."""
    choices = [Choice() for _ in range(call.num_choices)]
    done: TextDone | None = None
    async with aclosing(generate_all(call, generate)) as events:
        async for event in events:
            if isinstance(event, TextPiece):
                choices[event.index].append(event)
            elif isinstance(event, TextDone):
                done = event
    assert done is not None, "a text ends with TextDone or with an error"
    return choices, done


async def generate_all(call: CompletionCall, generate: Generate) -> AsyncGenerator[TextEvent, None]:
    """Yield the events of all prompts: cumulative TextBegans, and a single TextDone at the end.

    Closing this closes the iterator of every prompt.
    """
    began, done = NOTHING, NOTHING
    async with aclosing(_merge(call, generate)) as events:
        async for prompt, event in events:
            match event:
                case TextBegan():
                    began = added(began, counted(NOTHING, event))
                    yield TextBegan(
                        num_prompt_tokens=began.num_prompt_tokens, num_cached_tokens=began.num_cached_tokens
                    )
                case TextPiece():
                    yield replace(event, index=prompt * call.n + event.index)
                case TextDone():
                    done = added(done, event)
    yield done


async def _merge(call: CompletionCall, generate: Generate) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Yield the events of all prompts with the prompt's index. A single prompt needs no task."""
    if len(call.requests) == 1:
        async with aclosing(generate(call.requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TextEvent | Exception | None]] = asyncio.Queue(_MAX_QUEUED)
    tasks = [asyncio.create_task(_into(queue, prompt, generate(r))) for prompt, r in enumerate(call.requests)]
    try:
        num_open = len(tasks)
        while num_open:
            prompt, queued = await queue.get()
            if isinstance(queued, Exception):
                raise queued
            if queued is None:
                num_open -= 1
            else:
                yield prompt, queued
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _into(
    queue: "asyncio.Queue[tuple[int, TextEvent | Exception | None]]",
    prompt: int,
    events: AsyncGenerator[TextEvent, None],
) -> None:
    """Put a prompt's events into the queue, then None or the error."""
    end: Exception | None = None
    try:
        async with aclosing(events):
            async for event in events:
                await queue.put((prompt, event))
    except Exception as error:  # noqa: BLE001 - raised again by the queue's reader
        end = error
    await queue.put((prompt, end))
