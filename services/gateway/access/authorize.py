"""Authorization: from a call's headers and the scope that it needs to the caller, or a refusal. The same at every door.

    headers ─▶ key ─▶ holder ─▶ scope ─▶ rate and quota ─▶ Caller

Knows neither HTTP nor gRPC: header names are lower case in both.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from services.contracts.access import ANYONE, Caller, Scope
from services.errors import NotAllowed, Unauthenticated
from services.gateway.access.browsers import refuse_other_names, refuse_other_sites
from services.gateway.access.keyring import Holder
from services.gateway.access.rates import Rates

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"

_BEARER = "bearer "
_CHANGING = frozenset({Scope.EVENTS, Scope.ADMIN})
"""The scopes of calls that change something."""


class Access(Protocol):
    """Decides whether a call is admitted; every door calls it before anything else."""

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """Return the caller, and count the call. Raises Unauthenticated, NotAllowed or QuotaExceeded. Does not block."""
        ...


class OpenAccess:
    """Admits every call as one caller, but what other sites' pages make browsers do: for a server without keys."""

    def __init__(self, caller: Caller = ANYONE, names: frozenset[str] | None = None) -> None:
        """Take the caller, and the server's names besides localhost and addresses; None: any name."""
        self._caller = caller
        self._names = names

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """Return the caller. Raises InvalidRequest."""
        if self._names is not None:
            refuse_other_names(headers, self._names)
        if scope in _CHANGING:
            refuse_other_sites(headers)
        return self._caller


class Keys(Protocol):
    """The valid keys."""

    def find(self, key: str, now_unix_s: float) -> Holder | None:
        """Return the key's holder; None if it is unknown or has expired."""
        ...


class KeyedAccess:
    """Checks the key, its scope and its rate, in this order. A call that lacks the scope uses no quota."""

    def __init__(
        self,
        keys: Keys,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._rates = rates
        self._clock = clock
        self._wall_clock = wall_clock

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """See Access."""
        now_unix_s = self._wall_clock()
        holder = self._keys.find(key_from(headers), now_unix_s)
        if holder is None:
            raise Unauthenticated
        caller = holder.caller
        if scope not in caller.scopes:
            raise NotAllowed(scope, caller.key_id)
        self._rates.spend(caller.key_id, holder.allowance, now_unix_s, self._clock())
        return caller


def key_from(headers: Mapping[str, str]) -> str:
    """Return the key that was sent as `authorization: Bearer KEY` or, without that header, as `x-api-key: KEY`.

    Empty when there is none, which is refused like any other wrong key.
    """
    authorization = headers.get(AUTHORIZATION)
    if authorization is None:
        return headers.get(API_KEY, "")
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return authorization[len(_BEARER) :].strip() if is_bearer else ""


def access_by(keys: Keys | None, max_k: int, names: frozenset[str]) -> Access:
    """Return the access by these keys; without keys everybody may do everything, with at most `max_k` items a request.

    A server without keys is called by one of its `names`, by localhost or by an address.
    """
    return OpenAccess(replace(ANYONE, max_k=max_k), names) if keys is None else KeyedAccess(keys, Rates())
