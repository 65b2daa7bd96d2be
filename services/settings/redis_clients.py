"""Clients of redis-py that read the password at each connection and talk only to the primary.

A failover leaves the old primary alive as a replica, with every connection to it open: it rejects writes with READONLY
and answers reads with stale data. Each connection asks for the server's role when it is made and once a second while it
is used. The first replica on any connection of a client makes all of them reconnect; a new connection to a replica is
refused with ReadOnlyError.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio import Connection as AsyncConnection
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, MasterDownError, ReadOnlyError, ResponseError
from redis.retry import Retry

from services.errors import ConfigError
from services.settings.addresses import REDIS_PASSWORD_FILE, RedisAddress, check_ca_file, read_secret

_NOT_PRIMARY = (ReadOnlyError, MasterDownError)
"""A replica's errors: to a write, and to a read while it has lost its primary and may not answer."""
_REPLICA = {b"replica", b"slave", "replica", "slave"}
_ROLE_EVERY_S = 1.0


class PasswordFile(CredentialProvider):
    """The user and the password, read from its file at each connection."""

    def __init__(self, path: Path, username: str) -> None:
        self._path, self._username = path, username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the credentials. Raises AuthenticationError for an unreadable file."""
        try:
            password = read_secret(self._path, REDIS_PASSWORD_FILE)
        except ConfigError as error:
            raise AuthenticationError(str(error)) from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _Demotions:
    """Number of times that a server of this client's connections has turned out to be a replica."""

    def __init__(self) -> None:
        self.count = 0


_Connection: Any = object
"""The base of the mixins below: redis-py's connections, blocking or asynchronous."""


class _Guard(_Connection):  # type: ignore[misc]
    """State of one connection: when its server's role was asked for, after how many demotions."""

    def __init__(self, *, demotions: _Demotions, **options: Any) -> None:
        super().__init__(**options)
        self._demotions, self._seen, self._asked_s = demotions, demotions.count, 0.0

    def _is_outdated(self) -> bool:
        return self._seen != self._demotions.count

    def _is_due(self) -> bool:
        return time.monotonic() - self._asked_s > _ROLE_EVERY_S

    def _check(self, hello: Any) -> None:
        """Raise ReadOnlyError if a replica answered the HELLO."""
        fields = hello if isinstance(hello, Mapping) else dict(zip(hello[::2], hello[1::2], strict=False))
        if {fields.get(b"role"), fields.get("role")} & _REPLICA:
            raise ReadOnlyError("the server is a replica")
        self._asked_s = time.monotonic()


class _ToPrimary(_Guard):
    """For blocking connections."""

    def on_connect_check_health(self: Any, check_health: bool = True) -> None:
        """Authenticate, then refuse a replica."""
        self._seen = self._demotions.count
        super().on_connect_check_health(check_health)
        self._ask_role()

    def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        """Send, over a new connection if this connection's server has become a replica."""
        if self._is_outdated():
            self.disconnect()
        elif check_health and self._sock and self._is_due():
            try:
                self._ask_role()
            except ReadOnlyError:
                self._demotions.count += 1
                self.disconnect()
        super().send_packed_command(command, check_health)

    def read_response(self: Any, *arguments: Any, **options: Any) -> Any:
        """Read an answer, and record a replica's error."""
        try:
            return super().read_response(*arguments, **options)
        except _NOT_PRIMARY:
            self._demotions.count += 1
            raise

    def _ask_role(self: Any) -> None:
        hello: Any = ()
        with suppress(ResponseError):  # from a proxy, or to a user without the permission
            self.send_command("HELLO", check_health=False)
            hello = super().read_response()
        self._check(hello)


class _AsyncToPrimary(_Guard):
    """For asyncio's connections."""

    async def on_connect_check_health(self: Any, check_health: bool = True) -> None:
        """Authenticate, then refuse a replica."""
        self._seen = self._demotions.count
        await super().on_connect_check_health(check_health)
        await self._ask_role()

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        """Send, over a new connection if this connection's server has become a replica."""
        if self._is_outdated():
            await self.disconnect(nowait=True)
        elif check_health and self.is_connected and self._is_due():
            try:
                await self._ask_role()
            except ReadOnlyError:
                self._demotions.count += 1
                await self.disconnect(nowait=True)
        await super().send_packed_command(command, check_health)

    async def read_response(self: Any, *arguments: Any, **options: Any) -> Any:
        """Read an answer, and record a replica's error."""
        try:
            return await super().read_response(*arguments, **options)
        except _NOT_PRIMARY:
            self._demotions.count += 1
            raise

    async def _ask_role(self: Any) -> None:
        hello: Any = ()
        with suppress(ResponseError):  # from a proxy, or to a user without the permission
            await self.send_command("HELLO", check_health=False)
            hello = await super().read_response()
        self._check(hello)


class _Plain(_ToPrimary, Connection):
    """A blocking connection without TLS."""


class _Tls(_ToPrimary, SSLConnection):
    """A blocking connection with TLS; it reads the CA file at each connection."""


class _AsyncPlain(_AsyncToPrimary, AsyncConnection):
    """An asyncio connection without TLS."""


class _AsyncTls(_AsyncToPrimary, AsyncSSLConnection):
    """An asyncio connection with TLS."""

    async def _connect(self) -> None:
        self.ssl_context.context = None  # redis-py would keep the first connection's CA file
        await super()._connect()  # type: ignore[no-untyped-call]


def open_redis(address: RedisAddress, timeout_s: float) -> Any:
    """Return a blocking client without connecting. Raises ConfigError for a bad file.

    It does not use redis-py's retries, which take up to 7 s, even for a refused password.
    """
    options = _options(address, timeout_s)
    options["retry"] = Retry(NoBackoff(), 0)
    kind = _Tls if options.pop("ssl", False) else _Plain
    return Redis.from_pool(ConnectionPool(connection_class=kind, **options))


def open_async_redis(
    address: RedisAddress, timeout_s: float | None = None, *, retries: bool = True, single_connection: bool = False
) -> Any:
    """Return an asyncio client without connecting. See `open_redis`."""
    options = _options(address, timeout_s)
    if not retries:
        options["retry"] = AsyncRetry(NoBackoff(), 0)
    kind = _AsyncTls if options.pop("ssl", False) else _AsyncPlain
    pool: Any = AsyncConnectionPool(connection_class=kind, **options)
    client = AsyncRedis(connection_pool=pool, single_connection_client=single_connection)
    client.auto_close_connection_pool = True
    return client


def _options(address: RedisAddress, timeout_s: float | None) -> dict[str, Any]:
    timeouts = {} if timeout_s is None else {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return {**client_options(address), **timeouts, "demotions": _Demotions()}


def client_options(address: RedisAddress) -> dict[str, Any]:
    """Return the arguments of redis-py's client, which reads the password at each connection.

    Raises ConfigError for a bad file.
    """
    options: dict[str, Any] = {"host": address.host, "port": address.port}
    if address.tls_ca_file is not None:
        check_ca_file(address.tls_ca_file, "TAILRACE_REDIS_TLS_CA_FILE")
    if address.password_file is not None:
        read_secret(address.password_file, REDIS_PASSWORD_FILE)
        options["credential_provider"] = PasswordFile(address.password_file, address.username)
    elif address.username:
        options["username"] = address.username
    return options | address.tls_options()
