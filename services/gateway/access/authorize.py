"""Authorization: from a call's headers and required scope to the caller, or a refusal. The same at every door.

    headers ─▶ key ─▶ holder ─▶ scope ─▶ rate and quota ─▶ Caller

Knows neither HTTP nor gRPC: header names are lower case in both.
"""

import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol
from urllib.parse import urlsplit

from services.contracts.access import ANYONE, Allowance, Caller, Scope
from services.errors import InvalidRequest, NotAllowed, QuotaExceeded, Unauthenticated
from services.gateway.access.keyring import Holder, KeysState
from services.gateway.access.shared_rates import SharedRates, Standing
from services.gateway.call.headers import Call

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"

_LOOPBACK_NAME = "localhost"
_BEARER = "bearer "
_CHANGING = frozenset({Scope.EVENTS, Scope.ITEMS, Scope.ERASE, Scope.ADMIN})
"""The scopes of calls that change state."""


class OpenAccess:
    """Admits every call as one caller, for a server without keys; rejects calls from other sites' pages.

    A page cannot send a key for another site, so only a server without keys is at risk, in two ways:

    - DNS rebinding: the page's own name resolves to this machine, and the browser sends that name as `Host`. Addresses
    are
      accepted, since they cannot be rebound.
    - CSRF: a form or a script posts to this machine. The browser reports this in `Sec-Fetch-Site`, older browsers in
      `Origin`; other programs send neither.
    """

    degraded: tuple[str, ...] = ()

    def __init__(self, caller: Caller = ANYONE, names: frozenset[str] | None = None) -> None:
        """`names` are the server's names in addition to localhost and addresses; None accepts any name."""
        self._caller = caller
        self._names = names

    async def authorize(self, call: Call, headers: Mapping[str, str], scope: Scope) -> None:
        """Set the caller. Raises InvalidRequest."""
        if self._names is not None:
            _refuse_other_names(headers, self._names)
        if scope in _CHANGING:
            _refuse_other_sites(headers)
        call.caller = self._caller

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


def open_to_all(max_k: int, names: frozenset[str]) -> OpenAccess:
    """Return the access without keys: every caller has all scopes, with at most `max_k` items per request.

    Callers address the server by one of its `names`, by localhost or by an IP address.
    """
    return OpenAccess(replace(ANYONE, max_k=max_k), names)


def _refuse_other_names(headers: Mapping[str, str], names: frozenset[str]) -> None:
    """Reject a `Host` that is neither an address, nor localhost, nor one of these names. Raises InvalidRequest."""
    host = headers.get("host")
    if host is None:
        return
    name = _name_of(host)
    if not (_is_address(name) or name == _LOOPBACK_NAME or name.endswith(f".{_LOOPBACK_NAME}") or name in names):
        raise InvalidRequest(
            "host", f"{name!r} is no name of this server", "call its address, or add the name to TAILRACE_ALLOWED_HOSTS"
        )


def _refuse_other_sites(headers: Mapping[str, str]) -> None:
    """Reject a call that another site's page makes from a visitor's browser (CSRF). Raises InvalidRequest."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    fix = "use the console's own page, or no browser"
    if site not in (None, "same-origin", "none"):
        raise InvalidRequest("sec-fetch-site", f"a page of another site ({site})", fix)
    if site is None and origin is not None and _place_of(origin) != headers.get("host"):
        raise InvalidRequest("origin", f"a page of another site ({origin})", fix)


def _name_of(host: str) -> str:
    """Return a `Host` header's name without its port, in lower case; a malformed header keeps its text."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:  # brackets without a valid address
        name = None
    return (name or host).rstrip(".").lower()


def _place_of(origin: str) -> str | None:
    """Return an `Origin` header's host and port; None if malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Keys(Protocol):
    """The valid keys."""

    def find(self, key: str, now_unix_s: float) -> Holder | None:
        """Return the key's holder; None if it is unknown or has expired."""
        ...

    @property
    def state(self) -> KeysState:
        """The source of the valid keys."""
        ...

    async def start(self) -> None:
        """Start following changes."""
        ...

    async def stop(self) -> None:
        """Stop following."""
        ...


class KeyedAccess:
    """Checks the key, its scope and its rate, in this order. A call without the scope uses no quota."""

    def __init__(self, keys: Keys, rates: SharedRates, wall_clock: Callable[[], float] = time.time) -> None:
        """Takes ownership of `keys` and `rates`: starts and stops both."""
        self._keys = keys
        self._rates = rates
        self._wall_clock = wall_clock

    async def authorize(self, call: Call, headers: Mapping[str, str], scope: Scope) -> None:
        """Authorize a call; see Access."""
        holder = self._keys.find(key_from(headers), self._wall_clock())
        if holder is None:
            raise Unauthenticated
        caller = holder.caller
        if scope not in caller.scopes:
            raise NotAllowed(scope, caller.key_id)
        if holder.allowance.is_limited:
            meter = call.meter = _KeyMeter(self._rates, caller.key_id, holder.allowance)
            await meter.count(1)
        call.caller = caller

    @property
    def degraded(self) -> tuple[str, ...]:
        """The degraded modes; see Access."""
        modes = {
            "API keys outdated": self._keys.state is KeysState.OUTDATED,
            "API keys missing": self._keys.state is KeysState.GONE,
            "rate limits counted per gateway": self._rates.is_unavailable,
        }
        return tuple(mode for mode, is_on in modes.items() if is_on)

    async def start(self) -> None:
        """Start; see Access."""
        await self._keys.start()
        await self._rates.start()

    async def stop(self) -> None:
        """Stop; see Access."""
        await self._keys.stop()
        await self._rates.stop()


class _KeyMeter:
    """One call of a key with limits."""

    def __init__(self, rates: SharedRates, key_id: str, allowance: Allowance) -> None:
        self._rates = rates
        self._key_id = key_id
        self._allowance = allowance
        self._standing: Standing | None = None

    @property
    def max_cost(self) -> int:
        return self._allowance.max_cost

    def headers(self) -> Mapping[str, str]:
        return {} if self._standing is None else self._standing.headers()

    async def count(self, cost: int) -> None:
        try:
            self._standing = await self._rates.spend(self._key_id, self._allowance, cost)
        except QuotaExceeded:
            self._standing = self._rates.standing_of(self._key_id, self._allowance)
            raise

    async def charge(self, num_more: int) -> None:
        try:
            await self.count(num_more)
        except QuotaExceeded:
            self._rates.give_back(self._key_id, 1)
            self._standing = self._rates.standing_of(self._key_id, self._allowance)
            raise


def key_from(headers: Mapping[str, str]) -> str:
    """Return the key sent as `authorization: Bearer KEY` or, without that header, as `x-api-key: KEY`.

    Empty without a key, which is refused like any other wrong key.
    """
    authorization = headers.get(AUTHORIZATION)
    if authorization is None:
        return headers.get(API_KEY, "")
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return authorization[len(_BEARER) :].strip() if is_bearer else ""
