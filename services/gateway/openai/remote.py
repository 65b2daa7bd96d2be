"""A text writer that asks another OpenAI-compatible server, streaming: vLLM, Ray Serve LLM, a hosted one.

    TextRequest ─▶ remote_body ─▶ POST /completions | /chat/completions ─▶ SSE ─▶ remote_reading ─▶ TextEvents

The prompt's length is known only at the end, since servers tell it in the last chunk. Breaker, places and deadline are the
text tier's, as for our own writer; the deadline goes along as a header for servers that mind it. Closing the iterator closes
the connection, which cancels the work over there.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import httpx
import structlog

from services.contracts.text import TextEvent, TextModel, TextRequest
from services.errors import DeadlineExceeded, DependencyAway, NotFound
from services.gateway.call.headers import DEADLINE_MS
from services.gateway.openai.remote_body import body_of
from services.gateway.openai.remote_events import data_of
from services.gateway.openai.remote_reading import Reading
from services.gateway.openai.remote_refusals import away, refusal_of
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 30.0
"""The longest silence, that before the first token included."""
KEEPALIVE_S = 2.0
"""How long a free connection is kept: less than servers keep theirs (vLLM 5 s), so that none is closed under a request."""


class RemoteWriter:
    """Writes by asking the server at `url`. Make it in the event loop that serves.

    Args:
        url: Where it is, up to and with /v1.
        key: Gives its API key, asked at every request so that the key's file can be replaced; empty: none.
        only_model: The one of its models that is offered here; empty: all.
        read_timeout_s: The longest silence.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        url: str,
        key: Callable[[], str],
        *,
        only_model: str = "",
        read_timeout_s: float = READ_TIMEOUT_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key
        self._only_model = only_model
        self._wall_clock = wall_clock
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=KEEPALIVE_S),
            timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def models(self) -> tuple[TextModel, ...]:
        """Return what the server lists, as far as it is offered here. Raises DependencyAway."""
        with _away():
            answer = await self._http.get("/models", headers=self._headers())
            if answer.status_code != httpx.codes.OK:
                raise away(f"GET {answer.url.path} said {answer.status_code}")
            listed = [_model(one) for one in answer.json()["data"]]
        return tuple(one for one in listed if self._only_model in {"", one.name})

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Write; see TextWriter."""
        if self._only_model not in {"", request.model}:
            raise NotFound(f"there is no model {request.model!r:.80}", f"ask {self._only_model}")
        headers = {**self._headers(), **dict(request.trace), **self._deadline(request)}
        path, reading = "/chat/completions" if request.messages else "/completions", Reading(request)
        with _away():
            async with self._http.stream("POST", path, json=body_of(request), headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise refusal_of(answer.status_code, answer.headers, await answer.aread())
                async for data in data_of(answer.aiter_bytes()):
                    for event in reading.events_of(data):
                        yield event
            yield reading.done()

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"authorization": f"Bearer {key}"} if key else {}

    def _deadline(self, request: TextRequest) -> dict[str, str]:
        if request.deadline_unix_s is None:
            return {}
        left_ms = round((request.deadline_unix_s - self._wall_clock()) * 1_000)
        if left_ms <= 0:
            raise DeadlineExceeded("text")
        return {DEADLINE_MS: str(min(left_ms, MAX_TEXT_DEADLINE_MS))}


@contextmanager
def _away() -> Iterator[None]:
    """Say that the server is away, whatever the way to it broke at, and tell the operator why."""
    try:
        yield
    except DependencyAway as error:
        log.warning("text_server_failed", error="; ".join(error.__notes__))
        raise
    except (httpx.HTTPError, httpx.StreamError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("text_server_failed", error=repr(error))
        raise away(repr(error)) from error


def _model(listed: dict[str, object]) -> TextModel:
    longest, created = listed.get("max_model_len"), listed.get("created")
    return TextModel(
        name=str(listed["id"]),
        max_context_tokens=longest if isinstance(longest, int) else None,
        created_unix_s=created if isinstance(created, int) else 0,
    )
