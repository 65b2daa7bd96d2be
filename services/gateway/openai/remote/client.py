"""A text writer that calls another OpenAI-compatible server with streaming: vLLM, Ray Serve LLM, a hosted service.

    TextRequest ─▶ body ─▶ POST /completions | /chat/completions ─▶ server-sent events ─▶ stream ─▶ TextEvents

Servers send the prompt's length in the last chunk, which a text cut at its deadline never gets. vLLM, SGLang and
Tailrace, which list the maximum context of a model, send it in every chunk on request; others may refuse the field.
The text tier provides breaker, places and deadline, as for our own writer; the deadline is also sent as a header for
servers that honour it. Closing the iterator closes the connection, which cancels the work at the server.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import pydantic_core
import structlog

from services.contracts.text import SamplingOptions, TextEvent, TextModel, TextRequest
from services.errors import ConfigError, DeadlineExceeded, DependencyUnavailable, NotFound
from services.gateway.openai.chunks import Json
from services.gateway.openai.parse import ANY_OBJECT
from services.gateway.openai.remote.errors import error_of_response, unavailable
from services.gateway.openai.remote.stream import ChunkReader, data_of
from services.gateway.openai.schema import MAX_TEXT_DEADLINE_MS
from services.peer import peer_client, peer_headers

log = structlog.get_logger()

READ_TIMEOUT_S = 30.0
"""The longest silence, including the time to the first token."""
_MODELS_TIMEOUT_S = 0.5
_NUM_IDLE = 16
_MAX_COMPLETION_TOKENS = "max_completion_tokens"
"""OpenAI's newer name of `max_tokens`: its reasoning models accept only this name, other servers know the older one."""
_DEFAULT = SamplingOptions()
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


class RemoteWriter:
    """A TextWriter over the server at `url`. Create it in the event loop that serves.

    Args:
        url: The server's base URL, including /v1.
        key: Returns the API key, or an empty string; called at every request, so that the key file can be replaced.
            Raises ConfigError if a required key is missing: the server is then unavailable.
        only_model: The only model of the server offered here; empty: all.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        url: str,
        key: Callable[[], str],
        *,
        only_model: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key
        self._only_model = only_model
        self._wall_clock = wall_clock
        self._counts_early: bool | None = None
        """Whether the server takes `continuous_usage_stats`; None before it was asked for its models."""
        self._http = peer_client(url, num_idle=_NUM_IDLE, read_timeout_s=READ_TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> tuple[TextModel, ...]:
        """Return the server's models that are offered here. Raises DependencyUnavailable."""
        with _as_unavailable():
            answer = await self._http.get("/models", headers=peer_headers(self._key()))
            if answer.status_code != httpx.codes.OK:
                raise unavailable(f"GET {answer.url.path} returned {answer.status_code}")
            listed = [_model(entry) for entry in answer.json()["data"]]
        self._counts_early = any(model.max_context_tokens is not None for model in listed)
        return tuple(model for model in listed if self._only_model in {"", model.name})

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Generate text; see TextWriter."""
        if self._only_model not in {"", request.model}:
            raise NotFound(f"there is no model {request.model!r:.80}", f"ask {self._only_model}")
        path, reader = "/chat/completions" if request.messages else "/completions", ChunkReader(request)
        with _as_unavailable():
            body = body_of(request, counts_early=await self._can_count_early(request))
            headers = peer_headers(self._key(), request.trace, self._deadline_ms(request))
            async with self._http.stream("POST", path, json=body, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise error_of_response(answer.status_code, answer.headers, await answer.aread())
                async for data in data_of(answer.aiter_bytes()):
                    for event in reader.events_of(data):
                        yield event
            yield reader.done()

    async def _can_count_early(self, request: TextRequest) -> bool:
        """Whether to ask for the counts in every chunk: for a text with a deadline, if the server knows the field."""
        if request.deadline_unix_s is None:
            return False
        if self._counts_early is None:
            self._counts_early = False
            with suppress(DependencyUnavailable, TimeoutError):
                async with asyncio.timeout(_MODELS_TIMEOUT_S):
                    await self.models()
        return bool(self._counts_early)

    def _deadline_ms(self, request: TextRequest) -> int | None:
        if request.deadline_unix_s is None:
            return None
        left_ms = round((request.deadline_unix_s - self._wall_clock()) * 1_000)
        if left_ms <= 0:
            raise DeadlineExceeded("text")
        return min(left_ms, MAX_TEXT_DEADLINE_MS)


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Convert failures of the key, the connection or the answer's format to DependencyUnavailable; log the cause."""
    try:
        yield
    except DependencyUnavailable as error:
        log.warning("text_server_failed", error="; ".join(error.__notes__))
        raise
    except ConfigError as error:
        log.warning("text_server_failed", error=str(error))
        raise unavailable(str(error)) from error
    except (httpx.HTTPError, httpx.StreamError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("text_server_failed", error=repr(error))
        raise unavailable(repr(error)) from error


def _model(entry: dict[str, object]) -> TextModel:
    max_model_len, created = entry.get("max_model_len"), entry.get("created")
    return TextModel(
        name=str(entry["id"]),
        max_context_tokens=max_model_len if isinstance(max_model_len, int) else None,
        created_unix_s=created if isinstance(created, int) else 0,
    )


def body_of(request: TextRequest, *, counts_early: bool = False) -> Json:
    """Return the body for the other server; `counts_early` asks for the counts of tokens in every chunk.

    A setting at its default is omitted unless the caller sent it: not every server knows all settings, and a value that
    the caller sent must not become the server's default, which in vLLM is the checkpoint's. A salt is combined with the
    key: equal salts of two keys differ.
    """
    counts = {"include_usage": True, **({"continuous_usage_stats": True} if counts_early else {})}
    body: Json = {"model": request.model, "stream": True, "stream_options": counts}
    sampling = request.sampling
    body |= {name: getattr(sampling, name) for name in _SAMPLING if _is_set(request, name)}
    optional = {
        "n": request.n if request.n > 1 else None,
        _MAX_COMPLETION_TOKENS if _MAX_COMPLETION_TOKENS in request.settings_sent else "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "response_format": _response_format(request),
        "cache_salt": request.cache_salt and request.cache_scope.hex(),
    }
    return body | {name: value for name, value in optional.items() if value} | _route_fields(request)


def _is_set(request: TextRequest, name: str) -> bool:
    return name in request.settings_sent or getattr(request.sampling, name) != getattr(_DEFAULT, name)


def _route_fields(request: TextRequest) -> Json:
    """Return the fields that differ between the two routes: prompt or messages, and logprobs."""
    num_top = request.sampling.num_logprobs
    if request.messages:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        logprobs = {} if num_top is None else {"logprobs": True, "top_logprobs": num_top}
        variables = dict(request.chat_template_kwargs)
        return {"messages": messages, **logprobs, **({"chat_template_kwargs": variables} if variables else {})}
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt or ())
    return {"prompt": prompt, **({} if num_top is None else {"logprobs": num_top})}


def _response_format(request: TextRequest) -> Json | None:
    if request.json_schema is None:
        return None
    if request.json_schema == ANY_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": pydantic_core.from_json(request.json_schema)}
    return {"type": "json_schema", "json_schema": schema | ({"strict": True} if request.is_schema_strict else {})}
