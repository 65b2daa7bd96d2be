"""Erasure in Redis: removes users' data outside the rows that the worker's fence removes, and keeps the receipts.

    tailrace:erasure:<id>    hash: `accepted`, and the time (Unix ms) of each finished store. Names no user; kept for 90
    days

The worker writes receipts, from one thread; gateways open and read them on their event loop.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from services.contracts.erasure import ErasureProgress, ErasureStore, precedes
from services.contracts.explanation import whose
from services.errors import RowChanged
from services.features.explanations import remove_explanations
from services.features.layout import RowLayout, entities_of, key_prefix
from services.features.ownership import RowWrite, write_unowned
from services.features.redis_calls import redis_as_dependency, within
from services.features.repo import RepoAddress, project_of
from services.features.schema import (
    BASE_TOPIC,
    BUNDLE_VERSION,
    USER_HISTORY,
    USER_ID,
    USER_RECOMMENDATIONS,
    USER_SHOWN,
    LogPosition,
)
from services.features.shown import chosen, read_shown, shown_write
from services.settings.addresses import RedisAddress

_RECEIPT = "tailrace:erasure:"
_KEEP_S = 90 * 86_400
_PER_EXCHANGE = 1_000
_SEEN = ("row_time_us", "topic_id", "partition", "offset")


class FileRewrite(Enum):
    """The state of a rewrite of Redis' append-only file."""

    NO_FILE = auto()
    REFUSED = auto()
    BUSY = auto()
    """An earlier rewrite runs, whose file may have data that was removed since."""
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class ErasingWriter:
    """Removes users' data and writes receipts. Used from one thread.

    Every call may be repeated, and raises DependencyUnavailable.
    """

    def __init__(self, address: RepoAddress) -> None:
        """Open the store without connecting. Raises EnvironmentFault when no features were applied."""
        from services.settings.redis_clients import open_redis

        self._project = project = project_of(address)
        self._client = open_redis(address.redis, address.socket_timeout_s)
        self._histories = RowLayout(USER_HISTORY, project)
        self._lists = RowLayout(USER_RECOMMENDATIONS, project)
        self._shown = RowLayout(USER_SHOWN, project)

    def remove_base_rows(self, user_ids: Sequence[str]) -> None:
        """Remove rows that base tables have restored meanwhile, if no event has changed them."""
        for chunk in _chunks(user_ids):
            self._remove_rows(chunk, lambda _user_id, position, _row_time_us: position.topic_id == BASE_TOPIC)

    def remove_lists(self, user_ids: Sequence[str], versions: Collection[str]) -> None:
        """Remove the lists that these bundles have stored for users."""
        keys = [self._lists.key(user_id, version) for user_id in user_ids for version in versions]
        with redis_as_dependency():
            for chunk in _chunks(keys):
                self._client.unlink(*chunk)

    def remove_leftover_lists(self, user_ids: Collection[str]) -> None:
        """Remove users' lists of all bundles, even of unpublished bundles; scans the keys of all lists."""
        prefix = key_prefix(USER_ID.name, BUNDLE_VERSION.name)
        with redis_as_dependency():
            keys = self._client.scan_iter(match=prefix + b"*", count=_PER_EXCHANGE)
            leftover = [key for key in keys if entities_of(key, self._project)[USER_ID.name] in user_ids]
            for chunk in _chunks(leftover):
                self._client.unlink(*chunk)

    def remove_shown(self, until_ms: Mapping[str, int], now_ms: int) -> None:
        """Remove impressions that precede then (Unix ms), also impressions that arrived after the rows' removal."""
        for chunk in _chunks(list(until_ms)):
            for user_id, row in read_shown(self._client, self._shown, chunk).items():
                times_ms = enumerate(last_s * 1_000 for last_s in row.times_s)
                later = [index for index, at_ms in times_ms if not precedes(at_ms, until_ms[user_id], now_ms)]
                if later and len(later) == len(row.item_ids):
                    continue
                write = shown_write(self._shown, chosen(row, later), row)
                if not later and not self._client.hexists(write.key, self._histories.fields_of(_SEEN)[0]):
                    write = replace(write, cells={}, is_replaced=True)  # the hash holds no other data
                with suppress(RowChanged):  # a newer impression has arrived and counts
                    write_unowned(self._client, [write])

    def remove_explanations(self, is_gone: Callable[[str, int], bool]) -> None:
        """Remove the explanations selected by `is_gone`, given user and time (Unix ms)."""

        def of_gone(record: bytes) -> bool:
            user_id, at_ms = whose(record)
            return user_id is not None and is_gone(user_id, at_ms)

        remove_explanations(self._client, of_gone)

    def remove_restored(self, is_gone: Callable[[str, LogPosition, int], bool]) -> None:
        """Remove the rows selected by `is_gone`, given user, last position and row time (Unix µs); scans all keys.

        For a restored store.
        """
        prefix = key_prefix(USER_ID.name)
        with redis_as_dependency():
            keys = self._client.scan_iter(match=prefix + b"*", count=_PER_EXCHANGE)
            user_ids = [entities_of(key, self._project)[USER_ID.name] for key in keys]
        for chunk in _chunks(user_ids):
            self._remove_rows(chunk, is_gone)

    def begin_rewrite(self) -> FileRewrite:
        """Have Redis rewrite its append-only file without the removed data: runs, is refused, or has no file."""
        from redis.exceptions import ResponseError

        with redis_as_dependency():
            try:
                if not self._client.info("persistence").get("aof_enabled"):
                    return FileRewrite.NO_FILE
                if self.rewrite_state() is FileRewrite.RUNNING:
                    return FileRewrite.BUSY
                self._client.bgrewriteaof()
            except ResponseError:  # no permission, or a provider without the command
                return FileRewrite.REFUSED
        return FileRewrite.RUNNING

    def rewrite_state(self) -> FileRewrite:
        """Return how the rewrite that was begun stands."""
        with redis_as_dependency():
            about = self._client.info("persistence")
        if about.get("aof_rewrite_in_progress") or about.get("aof_rewrite_scheduled"):
            return FileRewrite.RUNNING
        return FileRewrite.DONE if about.get("aof_last_bgrewrite_status") == "ok" else FileRewrite.FAILED

    def mark(self, receipts: Iterable[tuple[str, int]], stores: Iterable[ErasureStore], now_ms: int) -> None:
        """Record in receipts (id, acceptance in Unix ms) that these stores are done."""
        done = dict.fromkeys((store.value for store in stores), now_ms)
        with redis_as_dependency():
            for chunk in _chunks(list(receipts)):
                pipe = self._client.pipeline(transaction=False)
                for erasure_id, accepted_ms in chunk:
                    pipe.hset(_RECEIPT + erasure_id, mapping={"accepted": accepted_ms, **done})
                    pipe.expire(_RECEIPT + erasure_id, _KEEP_S)
                pipe.execute()

    def lacking(self, erasure_ids: Sequence[str]) -> set[str]:
        """Return the erasures whose receipt the store lacks."""
        counts: list[int] = []
        with redis_as_dependency():
            for chunk in _chunks(erasure_ids):
                pipe = self._client.pipeline(transaction=False)
                for erasure_id in chunk:
                    pipe.exists(_RECEIPT + erasure_id)
                counts += pipe.execute()
        return {erasure_id for erasure_id, exists in zip(erasure_ids, counts, strict=True) if not exists}

    def close(self) -> None:
        self._client.close()

    def _remove_rows(self, user_ids: Sequence[str], is_gone: Callable[[str, LogPosition, int], bool]) -> None:
        """Remove rows by user, last position and row time. A row changed meanwhile stays: an event has reached it."""
        fields = self._histories.fields_of(_SEEN)
        with redis_as_dependency():
            pipe = self._client.pipeline(transaction=False)
            for user_id in user_ids:
                pipe.hmget(self._histories.key(user_id), fields)
            rows = pipe.execute()
        for user_id, cells in zip(user_ids, rows, strict=True):
            row_time_us, *position = self._histories.values(_SEEN, cells).values()
            if cells[0] is not None and is_gone(user_id, LogPosition(*position), row_time_us):
                expected = dict(zip(fields, cells, strict=True))
                removal = RowWrite(self._histories.key(user_id), {}, expected=expected, is_replaced=True)
                with suppress(RowChanged):
                    write_unowned(self._client, [removal])


class RedisReceipts:
    """The receipts, for a gateway; constructed and used on one event loop."""

    def __init__(self, address: RedisAddress) -> None:
        """Make the client; it connects at the first use. Raises ConfigError for a bad password file."""
        from services.settings.redis_clients import open_async_redis

        self._client = open_async_redis(address)

    async def open(self, erasure_id: str, accepted_ms: int, timeout_s: float) -> None:
        """Create a receipt unless the worker already has. Raises DependencyUnavailable."""
        with redis_as_dependency():
            await within(timeout_s, self._open(_RECEIPT + erasure_id, accepted_ms))

    async def get(self, erasure_id: str, timeout_s: float) -> ErasureProgress | None:
        """Return a receipt; None if unknown or older than 90 days. Raises DependencyUnavailable."""
        with redis_as_dependency():
            receipt: Any = await within(timeout_s, self._read(_RECEIPT + erasure_id))
        if b"accepted" not in receipt:
            return None
        done = {store: receipt.get(store.value.encode()) for store in ErasureStore}
        return ErasureProgress(
            erasure_id=erasure_id,
            accepted_time_ms=int(receipt[b"accepted"]),
            stores={store: None if at is None else int(at) for store, at in done.items()},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def _open(self, key: str, accepted_ms: int) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hsetnx(key, "accepted", str(accepted_ms))
            pipe.expire(key, _KEEP_S)
            await pipe.execute()

    async def _read(self, key: str) -> Any:
        reading: Any = self._client.hgetall(key)
        return await reading


def _chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[at : at + _PER_EXCHANGE] for at in range(0, len(values), _PER_EXCHANGE))
