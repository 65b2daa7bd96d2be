"""The clients: one call makes attempts until an answer, a permanent error, or the deadline."""

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self, Unpack

from tailrace_client.address import Tls, parse_address
from tailrace_client.calls import (
    A,
    Assigned,
    ClientCall,
    ErasureReceipt,
    Event,
    Explanation,
    Recommendation,
    RecommendOptions,
    Recorded,
    UserData,
    assignment_call,
    batch_call,
    delete_item_call,
    erase_call,
    erasure_call,
    explain_call,
    get_item_call,
    patch_item_call,
    popular_call,
    put_items_call,
    recommend_call,
    record_call,
    search_call,
    similar_call,
    user_data_call,
)
from tailrace_client.items import CatalogueItem, ItemDeleted, ItemsPut
from tailrace_client.rest import AsyncRestTransport, RestTransport
from tailrace_client.retry import DEFAULTS, Attempts, CallOptions, RetryBudget, TailraceError
from tailrace_client.rpc import AsyncRpcTransport, RpcTransport
from tailrace_client.values import MILLISECONDS, checked

_RECOMMEND_MS = 200.0
_BATCH_MS = 1_000.0
_LONG_MS = 5_000.0
_EXPORT_MS = 60_000.0
"""An export reads all files of the logs."""


class Client:
    """A client for synchronous code; thread-safe. Create it after forking, and close it (or use `with`).

    Args:
        address: `http://HOST:8000`, `https://...`, `grpc://HOST:9000` or `grpcs://...`: the scheme selects the door.
        api_key: The key to send, if the server requires one.
        tls: The authority to trust and this client's certificate, for `https` and `grpcs`.
        options: How the client waits and retries.

    Each call takes `deadline_ms`, which covers all its attempts together, and raises TailraceError.
    """

    def __init__(
        self, address: str, *, api_key: str | None = None, tls: Tls | None = None, options: CallOptions = DEFAULTS
    ) -> None:
        server = parse_address(address, tls)
        self._door: Any = (RpcTransport if server.is_grpc else RestTransport)(server, _headers(api_key), tls)
        self._options = options
        self._budget = RetryBudget(options)

    def recommend(
        self, user_id: str | None = None, *, deadline_ms: float = _RECOMMEND_MS, **options: Unpack[RecommendOptions]
    ) -> Recommendation:
        """Recommend items to a user, or to a visitor without an id by `recent_item_ids`.

        Options: see RecommendOptions.
        """
        return self._answer(recommend_call(user_id, options), deadline_ms)

    def recommend_batch(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        deadline_ms: float = _BATCH_MS,
        **options: Unpack[RecommendOptions],
    ) -> tuple[Recommendation | TailraceError, ...]:
        """Recommend items to up to 100 users: ids, or options with a `user_id`; other options apply to all.

        An entry's error is returned in its position.
        """
        return self._answer(batch_call(requests, options), deadline_ms).answers

    def similar(
        self,
        item_ids: str | Sequence[str],
        user_id: str | None = None,
        *,
        deadline_ms: float = _RECOMMEND_MS,
        **options: Unpack[RecommendOptions],
    ) -> Recommendation:
        """List items similar to an item or a cart; with a user, without items that the user has seen or dislikes."""
        return self._answer(similar_call(item_ids, user_id, options), deadline_ms)

    def popular(
        self,
        window: str | None = None,
        category: str | None = None,
        k: int = 10,
        *,
        session_id: str | None = None,
        deadline_ms: float = _RECOMMEND_MS,
    ) -> Recommendation:
        """List popular items: within "1h", "24h" or "7d" (scores are users) or all time (scores are fractions)."""
        return self._answer(popular_call(window, category, k, session_id), deadline_ms)

    def search(
        self,
        q: str,
        user_id: str | None = None,
        *,
        session_id: str | None = None,
        surface: str | None = None,
        k: int = 10,
        deadline_ms: float = _RECOMMEND_MS,
    ) -> Recommendation:
        """Search items by words of their titles, or by a wish; ordered for the user, if any."""
        return self._answer(search_call(q, user_id, session_id, surface, k), deadline_ms)

    def assignment(
        self, user_id: str | None = None, *, session_id: str | None = None, deadline_ms: float = _LONG_MS
    ) -> Assigned:
        """Return the version and variants of a user, or a visitor's session, on each surface."""
        return self._answer(assignment_call(user_id, session_id), deadline_ms)

    def record(self, events: Event | Iterable[Event], *, deadline_ms: float = _LONG_MS) -> Recorded:
        """Record user events: all or none. Each takes effect once, however often it is sent."""
        return self._answer(record_call(events), deadline_ms)

    def explain(self, request_id: str, *, deadline_ms: float = _LONG_MS) -> Explanation:
        """Explain how a recent request was answered; needs a key with the scope for it, and the REST door."""
        return self._answer(explain_call(request_id), deadline_ms)

    def erase_user(self, user_id: str, *, deadline_ms: float = _LONG_MS) -> ErasureReceipt:
        """Erase a user; later events begin a new history. Needs a key with the scope `erase`."""
        return self._answer(erase_call(user_id), deadline_ms)

    def erasure(self, erasure_id: str, *, deadline_ms: float = _LONG_MS) -> ErasureReceipt:
        """Return the progress of an erasure."""
        return self._answer(erasure_call(erasure_id), deadline_ms)

    def user_data(self, user_id: str, *, deadline_ms: float = _EXPORT_MS) -> UserData:
        """Return all data that the server keeps about a user; needs the REST door."""
        return self._answer(user_data_call(user_id), deadline_ms)

    def put_items(self, items: CatalogueItem | Iterable[CatalogueItem], *, deadline_ms: float = _LONG_MS) -> ItemsPut:
        """Replace the state of items in the live catalogue; items are refused individually."""
        return self._answer(put_items_call(items), deadline_ms)

    def patch_item(self, item_id: str, changes: Mapping[str, Any], *, deadline_ms: float = _LONG_MS) -> CatalogueItem:
        """Change some fields of an item; None removes a field or an attribute."""
        return self._answer(patch_item_call(item_id, changes), deadline_ms)

    def get_item(self, item_id: str, *, deadline_ms: float = _LONG_MS) -> CatalogueItem:
        """Return an item as answers show it."""
        return self._answer(get_item_call(item_id), deadline_ms)

    def delete_item(self, item_id: str, *, deadline_ms: float = _LONG_MS) -> ItemDeleted:
        """Delete an item, from later bundles too."""
        return self._answer(delete_item_call(item_id), deadline_ms)

    def close(self) -> None:
        """Close the connections."""
        self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exit: object) -> None:
        self.close()

    def _answer(self, call: ClientCall[A], deadline_ms: float) -> A:
        within_ms = checked("deadline_ms", deadline_ms, MILLISECONDS)
        attempts = Attempts(self._options, self._budget, within_ms, time.monotonic())
        while True:
            try:
                answer: A = self._door.send(call, attempts)
            except TailraceError as error:
                time.sleep(attempts.pause_s(error, random.random(), time.monotonic()))
            else:
                return answer


class AsyncClient:
    """Like Client, for asynchronous code; create it in the event loop that uses it."""

    def __init__(
        self, address: str, *, api_key: str | None = None, tls: Tls | None = None, options: CallOptions = DEFAULTS
    ) -> None:
        server = parse_address(address, tls)
        self._door: Any = (AsyncRpcTransport if server.is_grpc else AsyncRestTransport)(server, _headers(api_key), tls)
        self._options = options
        self._budget = RetryBudget(options)

    async def recommend(
        self, user_id: str | None = None, *, deadline_ms: float = _RECOMMEND_MS, **options: Unpack[RecommendOptions]
    ) -> Recommendation:
        """Recommend items to a user, or to a visitor without an id by `recent_item_ids`.

        Options: see RecommendOptions.
        """
        return await self._answer(recommend_call(user_id, options), deadline_ms)

    async def recommend_batch(
        self,
        requests: Iterable[str | Mapping[str, Any]],
        *,
        deadline_ms: float = _BATCH_MS,
        **options: Unpack[RecommendOptions],
    ) -> tuple[Recommendation | TailraceError, ...]:
        """Recommend items to up to 100 users: ids, or options with a `user_id`; other options apply to all.

        An entry's error is returned in its position.
        """
        return (await self._answer(batch_call(requests, options), deadline_ms)).answers

    async def similar(
        self,
        item_ids: str | Sequence[str],
        user_id: str | None = None,
        *,
        deadline_ms: float = _RECOMMEND_MS,
        **options: Unpack[RecommendOptions],
    ) -> Recommendation:
        """List items similar to an item or a cart; with a user, without items that the user has seen or dislikes."""
        return await self._answer(similar_call(item_ids, user_id, options), deadline_ms)

    async def popular(
        self,
        window: str | None = None,
        category: str | None = None,
        k: int = 10,
        *,
        session_id: str | None = None,
        deadline_ms: float = _RECOMMEND_MS,
    ) -> Recommendation:
        """List popular items: within "1h", "24h" or "7d" (scores are users) or all time (scores are fractions)."""
        return await self._answer(popular_call(window, category, k, session_id), deadline_ms)

    async def search(
        self,
        q: str,
        user_id: str | None = None,
        *,
        session_id: str | None = None,
        surface: str | None = None,
        k: int = 10,
        deadline_ms: float = _RECOMMEND_MS,
    ) -> Recommendation:
        """Search items by words of their titles, or by a wish; ordered for the user, if any."""
        return await self._answer(search_call(q, user_id, session_id, surface, k), deadline_ms)

    async def assignment(
        self, user_id: str | None = None, *, session_id: str | None = None, deadline_ms: float = _LONG_MS
    ) -> Assigned:
        """Return the version and variants of a user, or a visitor's session, on each surface."""
        return await self._answer(assignment_call(user_id, session_id), deadline_ms)

    async def record(self, events: Event | Iterable[Event], *, deadline_ms: float = _LONG_MS) -> Recorded:
        """Record user events: all or none. Each takes effect once, however often it is sent."""
        return await self._answer(record_call(events), deadline_ms)

    async def explain(self, request_id: str, *, deadline_ms: float = _LONG_MS) -> Explanation:
        """Explain how a recent request was answered; needs a key with the scope for it, and the REST door."""
        return await self._answer(explain_call(request_id), deadline_ms)

    async def erase_user(self, user_id: str, *, deadline_ms: float = _LONG_MS) -> ErasureReceipt:
        """Erase a user; later events begin a new history. Needs a key with the scope `erase`."""
        return await self._answer(erase_call(user_id), deadline_ms)

    async def erasure(self, erasure_id: str, *, deadline_ms: float = _LONG_MS) -> ErasureReceipt:
        """Return the progress of an erasure."""
        return await self._answer(erasure_call(erasure_id), deadline_ms)

    async def user_data(self, user_id: str, *, deadline_ms: float = _EXPORT_MS) -> UserData:
        """Return all data that the server keeps about a user; needs the REST door."""
        return await self._answer(user_data_call(user_id), deadline_ms)

    async def put_items(
        self, items: CatalogueItem | Iterable[CatalogueItem], *, deadline_ms: float = _LONG_MS
    ) -> ItemsPut:
        """Replace the state of items in the live catalogue; items are refused individually."""
        return await self._answer(put_items_call(items), deadline_ms)

    async def patch_item(
        self, item_id: str, changes: Mapping[str, Any], *, deadline_ms: float = _LONG_MS
    ) -> CatalogueItem:
        """Change some fields of an item; None removes a field or an attribute."""
        return await self._answer(patch_item_call(item_id, changes), deadline_ms)

    async def get_item(self, item_id: str, *, deadline_ms: float = _LONG_MS) -> CatalogueItem:
        """Return an item as answers show it."""
        return await self._answer(get_item_call(item_id), deadline_ms)

    async def delete_item(self, item_id: str, *, deadline_ms: float = _LONG_MS) -> ItemDeleted:
        """Delete an item, from later bundles too."""
        return await self._answer(delete_item_call(item_id), deadline_ms)

    async def close(self) -> None:
        """Close the connections."""
        await self._door.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        await self.close()

    async def _answer(self, call: ClientCall[A], deadline_ms: float) -> A:
        within_ms = checked("deadline_ms", deadline_ms, MILLISECONDS)
        attempts = Attempts(self._options, self._budget, within_ms, time.monotonic())
        while True:
            try:
                answer: A = await self._door.send(call, attempts)
            except TailraceError as error:
                await asyncio.sleep(attempts.pause_s(error, random.random(), time.monotonic()))
            else:
                return answer


def _headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every call. Raises ValueError for a key that no header can have."""
    key = (api_key or "").strip()  # files of keys end with a line feed
    if not (key.isascii() and key.isprintable()):
        raise ValueError("api_key: not printable ASCII; send the key as `tailrace keys new` printed it")
    try:
        number = version("tailrace-client")
    except PackageNotFoundError:  # from a source folder
        number = "0"
    about = {"user-agent": f"tailrace-client/{number}"}
    return {**about, "authorization": f"Bearer {key}"} if key else about
