"""The REST door: one attempt of a call as an HTTP request, over httpx. Does not retry."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from tailrace_client.address import Address, Tls
from tailrace_client.answers import READERS
from tailrace_client.calls import A, ClientCall
from tailrace_client.retry import Attempts, TailraceError, late
from tailrace_client.values import refusal

_CODES = {
    401: "unauthenticated",
    403: "not_allowed",
    404: "not_found",
    413: "request_too_large",
    422: "invalid_request",
    429: "overloaded",
    502: "unreachable",
    503: "unavailable",
    504: "deadline_exceeded",
}
"""For answers from other servers, such as a proxy."""

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=60.0)
"""Idle connections end before the edge's 75 s."""


class RestTransport:
    """Makes attempts from synchronous code.

    Connecting, sending and each wait for bytes are bounded by the time left when they begin.
    """

    def __init__(self, address: Address, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._http = httpx.Client(**_options(address, headers, tls))
        self.close = self._http.close

    def send(self, call: ClientCall[A], attempts: Attempts) -> A:
        """Make one attempt. Raises TailraceError."""
        now_s = time.monotonic()
        left = _TimeLeft(now_s + attempts.left_s(now_s))
        request = _request(self._http, call, attempts.server_deadline_ms(now_s), {"timeout": left})
        try:
            answer = self._http.send(request)
        except httpx.TimeoutException:
            raise late() from None
        except httpx.RequestError as error:
            raise TailraceError("unreachable", _words(error)) from None
        return _read(call, answer, attempts.num)


class AsyncRestTransport:
    """From asynchronous code."""

    def __init__(self, address: Address, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._http = httpx.AsyncClient(**_options(address, headers, tls))
        self.close = self._http.aclose

    async def send(self, call: ClientCall[A], attempts: Attempts) -> A:
        """Make one attempt. Raises TailraceError."""
        now_s = time.monotonic()
        request = _request(self._http, call, attempts.server_deadline_ms(now_s), {})
        try:
            async with asyncio.timeout(attempts.left_s(now_s)):
                answer = await self._http.send(request)
        except TimeoutError:
            raise late() from None
        except httpx.RequestError as error:
            raise TailraceError("unreachable", _words(error)) from None
        return _read(call, answer, attempts.num)


class _TimeLeft(dict[str, float]):
    """The timeouts of a request: each phase gets the time left of one deadline when it begins."""

    def __init__(self, ends_s: float) -> None:
        super().__init__()
        self._ends_s = ends_s

    def get(self, _phase: str, _default: Any = None) -> float:
        return max(0.001, self._ends_s - time.monotonic())


def _options(address: Address, headers: Mapping[str, str], tls: Tls | None) -> dict[str, Any]:
    return {
        "base_url": f"{address.scheme}://{address.host_port}",
        "headers": headers,
        "verify": (tls or Tls()).context() if address.is_encrypted else False,
        "limits": _LIMITS,
        "timeout": None,
    }


def path_of(call: ClientCall[Any]) -> str:
    """Return the path with its parameters.

    Raises TailraceError for `.` and `..`: HTTP clients and proxies resolve them as relative paths.
    """
    for name, value in call.in_path.items():
        if value in {"", ".", ".."}:
            raise refusal(name, f"{value!r} fits in no path", "call the gRPC door", call.request_id)
    return call.path.format_map({name: quote(value, safe="") for name, value in call.in_path.items()})


def _request(
    http: httpx.Client | httpx.AsyncClient, call: ClientCall[Any], deadline_ms: int, extensions: dict[str, Any]
) -> httpx.Request:
    if call.verb in {"GET", "DELETE"}:
        sent = call.with_deadline(deadline_ms)
        named = {"x-deadline-ms": sent.get("deadline_ms"), "x-request-id": sent.get("request_id")}
        headers = {name.encode(): str(value).encode() for name, value in named.items() if value is not None}
        return http.build_request(
            call.verb, path_of(call), params=call.rest_only, headers=headers, extensions=extensions
        )
    fields = {**call.with_deadline(deadline_ms), **call.rest_only}
    if call.verb == "PATCH":  # the path names the item
        fields = {name: value for name, value in fields.items() if name != "item_id"}
    body = json.dumps(fields).encode()
    headers = {b"content-type": b"application/json"}
    headers |= {name.encode(): text.encode() for name, text in call.headers.items()}
    return http.build_request(call.verb, path_of(call), content=body, headers=headers, extensions=extensions)


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _read(call: ClientCall[A], answer: httpx.Response, num_attempts: int) -> A:
    body = _object(answer)
    if not answer.is_success or body is None:
        raise _refusal(answer, (body or {}).get("error"), call.request_id)
    try:
        read: A = READERS[call.answer](body, num_attempts)
    except (KeyError, TypeError):  # JSON of another server
        raise _refusal(answer, None, call.request_id) from None
    return read


def _object(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        body = answer.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _refusal(answer: httpx.Response, error: Any, request_id: str | None) -> TailraceError:
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code")
    retry_after = answer.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    return TailraceError(
        code if isinstance(code, str) else _CODES.get(answer.status_code, "internal"),
        str(fields.get("message") or f"status {answer.status_code} {answer.reason_phrase}, not from Tailrace"),
        field=fields.get("field"),
        fix=fields.get("fix"),
        retry_after_s=retry_after_s,
        request_id=fields.get("request_id") or request_id,
    )
