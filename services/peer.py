"""HTTP to another server that ranks or writes for a gateway: its connections, its key and the request's deadline."""

from collections.abc import Sequence

import httpx

DEADLINE_MS = "x-deadline-ms"
"""Milliseconds until the caller no longer waits, for servers that honour it."""
CONNECT_TIMEOUT_S = 2.0
KEEPALIVE_S = 2.0
"""Idle time until a connection is closed: shorter than the servers' (uvicorn 5 s), which then close none during a
request."""


def peer_client(url: str, *, num_idle: int, read_timeout_s: float | None = None) -> httpx.AsyncClient:
    """Return a client of the server at `url`. Create it in the event loop that serves.

    Args:
        url: Base URL of its routes.
        num_idle: Idle connections to keep.
        read_timeout_s: The longest silence; None: the caller has a timeout.
    """
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=num_idle, keepalive_expiry=KEEPALIVE_S),
        timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


def peer_headers(key: str, trace: Sequence[tuple[str, str]] = (), deadline_ms: int | None = None) -> dict[str, str]:
    """Return the headers of a request; `key` may be empty."""
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    return authorization | dict(trace) | ({} if deadline_ms is None else {DEADLINE_MS: str(deadline_ms)})
