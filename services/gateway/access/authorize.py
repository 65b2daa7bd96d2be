"""Authorization: from a call's headers and required scope to the caller, or a refusal. The same at every door.

    headers ─▶ key ─▶ holder ─▶ tenant ─▶ scope ─▶ rates and quotas of key and tenant ─▶ Caller

Knows neither HTTP nor gRPC: header names are lower case in both.
"""

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from urllib.parse import urlsplit

from services.contracts.access import ANYONE, Allowance, Caller, Scope
from services.contracts.tenant import Tenant, TenantState
from services.errors import InvalidRequest, NotAllowed, QuotaExceeded, TenantNotAllowed, Unauthenticated
from services.gateway.access.keyring import Holder, KeyRing, KeysState
from services.gateway.access.oidc import TokenVerifier, is_token
from services.gateway.access.shared_rates import SharedRates, Standing
from services.gateway.access.tenants import FollowedTenants
from services.gateway.call.headers import Call
from services.gateway.call.operation import Operation

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"

_LOOPBACK_NAME = "localhost"
_BEARER = "bearer "
_MAX_HOSTS = 64
"""Maximum `Host` headers whose check is kept: callers send few, but may send any."""
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

    async def authorize(self, call: Call, headers: Mapping[str, str], operation: Operation) -> None:
        """Set the caller. Raises InvalidRequest."""
        if self._names is not None:
            _refuse_other_names(headers, self._names)
        if operation.scope in _CHANGING:
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
    if host is not None and not _is_own(host, names):
        fix = "call its address, or add the name to TAILRACE_ALLOWED_HOSTS"
        raise InvalidRequest("host", f"{_name_of(host)!r} is no name of this server", fix)


@lru_cache(_MAX_HOSTS)
def _is_own(host: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header names this server."""
    name = _name_of(host)
    return _is_address(name) or name == _LOOPBACK_NAME or name.endswith(f".{_LOOPBACK_NAME}") or name in names


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


class KeyedAccess:
    """Checks the key, its tenant and scope, and the rates of both, in this order. A refused call uses no quota."""

    def __init__(
        self,
        keys: KeyRing,
        tenants: FollowedTenants,
        rates: SharedRates,
        tokens: TokenVerifier | None = None,
    ) -> None:
        """Takes ownership of `keys`, `tenants`, `rates` and `tokens`: starts and stops them."""
        self._keys = keys
        self._tenants = tenants
        self._rates = rates
        self._tokens = tokens

    async def authorize(self, call: Call, headers: Mapping[str, str], operation: Operation) -> None:
        """Authorize a call; see Access."""
        sent, now_unix_s = key_from(headers), time.time()
        if self._tokens is not None and is_token(sent):
            holder: Holder | None = await self._tokens.holder_of(sent, now_unix_s)
        else:
            holder = self._keys.find(sent, now_unix_s)
        if holder is None:
            raise Unauthenticated
        caller, limits = holder.caller, [(holder.caller.key_id, holder.allowance)]
        if caller.tenant:
            try:
                tenant = self._tenant_of(caller, operation)
            except Unauthenticated:
                if self._tokens is None or not is_token(sent):
                    raise
                raise self._tokens.unknown_tenant() from None
            max_k = min(caller.max_k, tenant.max_k or caller.max_k)
            caller = replace(caller, max_k=max_k, weight=tenant.share)
            limits.append((f"{tenant.id}/", tenant.allowance))  # no key has an id with a slash
        call.caller = caller
        if operation.required_scope not in caller.scopes:
            raise NotAllowed(operation.required_scope, caller.key_id)
        if limited := [(owner, allowance) for owner, allowance in limits if allowance.is_limited]:
            meter = call.meter = _Meter(self._rates, limited)
            await meter.count(1)

    def _tenant_of(self, caller: Caller, operation: Operation) -> Tenant:
        """Return the key's tenant. Raises Unauthenticated, or NotAllowed for a call that it may not make."""
        tenant = self._tenants.find(caller.tenant)
        if tenant is None or tenant.state is TenantState.DELETED:
            raise Unauthenticated
        if tenant.state is TenantState.SUSPENDED:
            raise TenantNotAllowed("the tenant of this key is suspended; ask the stack's operator", caller.key_id)
        if not operation.for_tenants:
            raise TenantNotAllowed("this call is for the stack's operator, not for tenants", caller.key_id)
        return tenant

    @property
    def degraded(self) -> tuple[str, ...]:
        """The degraded modes; see Access."""
        modes = {
            "API keys outdated": self._keys.state is KeysState.OUTDATED,
            "API keys missing": self._keys.state is KeysState.GONE,
            "tenants outdated": self._tenants.is_outdated,
            "issuer keys outdated": self._tokens is not None and self._tokens.is_outdated,
            "rate limits counted per gateway": self._rates.is_unavailable,
        }
        return tuple(mode for mode, is_on in modes.items() if is_on)

    async def start(self) -> None:
        """Start; see Access."""
        await self._keys.start()
        await self._tenants.start()
        await self._rates.start()
        if self._tokens is not None:
            await self._tokens.start()

    async def stop(self) -> None:
        """Stop; see Access."""
        await self._keys.stop()
        await self._tenants.stop()
        await self._rates.stop()
        if self._tokens is not None:
            await self._tokens.stop()


class _Meter:
    """One call, counted against the limits of its key and of the key's tenant; refused, it counts for neither."""

    def __init__(self, rates: SharedRates, limits: Sequence[tuple[str, Allowance]]) -> None:
        self._rates = rates
        self._limits = limits
        self._standings: list[Standing] = []

    @property
    def max_cost(self) -> int:
        return min(allowance.max_cost for _, allowance in self._limits)

    def headers(self) -> Mapping[str, str]:
        """Return the headers of the limit with the fewest remaining calls."""
        every = [standing.headers() for standing in self._standings]
        return min(every, key=lambda headers: int(headers["ratelimit-remaining"]), default={})

    async def count(self, cost: int) -> None:
        standings = []
        for index, (owner, allowance) in enumerate(self._limits):
            try:
                standings.append(await self._rates.spend(owner, allowance, cost))
            except QuotaExceeded:
                self._give_back(index, cost)
                self._standings = [self._rates.standing_of(owner, allowance)]
                raise
        self._standings = standings

    async def charge(self, num_more: int) -> None:
        try:
            await self.count(num_more)
        except QuotaExceeded:
            self._give_back(len(self._limits), 1)
            self._standings = [self._rates.standing_of(*limit) for limit in self._limits]
            raise

    def _give_back(self, num_limits: int, cost: int) -> None:
        for owner, _ in self._limits[:num_limits]:
            self._rates.give_back(owner, cost)


def key_from(headers: Mapping[str, str]) -> str:
    """Return the key sent as `authorization: Bearer KEY` or, without that header, as `x-api-key: KEY`.

    Empty without a key, which is refused like any other wrong key.
    """
    authorization = headers.get(AUTHORIZATION)
    if authorization is None:
        return headers.get(API_KEY, "")
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return authorization[len(_BEARER) :].strip() if is_bearer else ""
