"""One answer on its way out: whole, or as a stream of chunks that says itself when it breaks.

Knows HTTP only as something to send to; who writes and how it is told are handed in.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.contracts.text import TextDone, TextEvent, TextPiece
from services.errors import ErrorKind, as_tailrace_error
from services.gateway.call.http import json_response
from services.gateway.openai.answers import Plain, Shape, usage_of
from services.gateway.openai.call import CompletionCall
from services.gateway.openai.disconnect import Source, unless_gone
from services.gateway.openai.errors import plain_error
from services.gateway.openai.event_stream import DONE, EventStream, sse
from services.gateway.openai.generate import Write, whole, written
from services.gateway.openai.ranked import DOOR
from services.gateway.text.count import NOTHING, counted
from services.gateway.text.metrics import CANCELLED, OK, TextReport

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResponder:
    """What one caller asked for, who writes it, and how it is told.

    `route` is what metrics call it; `silence_s` is how long a stream may say nothing, its head included.
    """

    route: str
    request_id: str
    asked: CompletionCall
    shape: Shape
    write: Write
    report: TextReport
    silence_s: float

    async def answer(self, http: Request) -> Response:
        """Answer, as was asked. Raises what writing raises before the first event, and ClientDisconnect."""
        try:
            return await (self._stream(http) if self.asked.stream else self._at_once(http))
        except ClientDisconnect:
            self.report.ended(self.route, CANCELLED, self.request_id)
            raise

    async def _at_once(self, http: Request) -> Response:
        """Return the whole answer."""
        choices, done = await unless_gone(http, whole(self.asked, self.write))
        self.report.ended(self.route, OK, self.request_id)
        return json_response(self.shape.whole(choices, usage_of(done)))

    async def _stream(self, http: Request) -> Response:
        """Return the chunks. What fails before the first event, and before silence lasted too long, has a status of its own."""
        events = Source(written(self.asked, self.write))
        await events.wait(http, self.silence_s)
        return EventStream(self._chunks(events), events, self.silence_s)

    async def _chunks(self, events: Source[TextEvent]) -> AsyncGenerator[str, None]:
        code, asked = CANCELLED, self.asked
        try:
            async with aclosing(events):
                so_far = counted(NOTHING, await anext(events))
                for plain in self.shape.opening(asked.num_choices):
                    yield sse(_with_usage(plain, asked, so_far))
                async for event in events:
                    so_far = counted(so_far, event)
                    if isinstance(event, TextPiece):
                        yield sse(_with_usage(self.shape.chunk(event), asked, so_far))
                if asked.include_usage:
                    yield sse(self.shape.usage_chunk(usage_of(so_far)))
                code = OK
                yield DONE
        except Exception as error:  # the status is long gone: say it in the stream, and end it
            answer = as_tailrace_error(error)
            code = answer.kind.value
            if answer.kind is ErrorKind.INTERNAL:
                log.exception("unexpected_error", request_id=self.request_id, door=DOOR)
            yield sse(plain_error(answer))
        finally:
            self.report.ended(self.route, code, self.request_id)


def _with_usage(plain: Plain, asked: CompletionCall, so_far: TextDone) -> Plain:
    """Add what a chunk is to say of the usage: with include_usage the field is there, and null until the last."""
    if asked.continuous_usage:
        return {**plain, "usage": usage_of(so_far)}
    return {**plain, "usage": None} if asked.include_usage else plain
