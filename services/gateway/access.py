"""Who may come in: from a call's headers and the scope that it needs to the caller, or a refusal. The same at both doors.

    headers ─▶ key ─▶ holder ─▶ scope ─▶ rate and quota ─▶ Caller

Knows neither HTTP nor gRPC: header names are lower case in both. Where keys are kept and how rates are counted is handed in.
"""

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from services.contracts.access import ANYONE, Caller, Scope
from services.errors import NotAllowed, Unauthenticated

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"

_BEARER = "bearer "


class Access(Protocol):
    """What a door asks before it does anything else."""

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """Give the caller, and count the call. Raises Unauthenticated, NotAllowed or QuotaExceeded. Does not block."""
        ...


class OpenAccess:
    """Without keys everybody may do everything."""

    def __init__(self, caller: Caller = ANYONE) -> None:
        self._caller = caller

    def authorize(self, _headers: Mapping[str, str], _scope: Scope) -> Caller:
        """Give the one caller that there is."""
        return self._caller


class Keys(Protocol):
    """The valid keys."""

    def find(self, key: str, now_unix_s: float) -> Caller | None:
        """Give whose key this is; None for one that is unknown or has expired."""
        ...


class Meter(Protocol):
    """What each key has used."""

    def spend(self, key_id: str, now_unix_s: float, now_s: float) -> None:
        """Count one call. Raises QuotaExceeded."""
        ...


class KeyedAccess:
    """With keys: a valid one, its scope, its rate, in this order. A call that lacks the scope uses up no quota."""

    def __init__(
        self,
        keys: Keys,
        meter: Meter,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._meter = meter
        self._clock = clock
        self._wall_clock = wall_clock

    def authorize(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """See Access."""
        now_unix_s = self._wall_clock()
        key = key_from(headers)
        caller = None if key is None else self._keys.find(key, now_unix_s)
        if caller is None:
            raise Unauthenticated
        if scope not in caller.scopes:
            raise NotAllowed(scope)
        self._meter.spend(caller.key_id, now_unix_s, self._clock())
        return caller


def key_from(headers: Mapping[str, str]) -> str | None:
    """Give the key that was sent as `authorization: Bearer KEY` or, without that header, as `x-api-key: KEY`."""
    authorization = headers.get(AUTHORIZATION)
    if authorization is None:
        return headers.get(API_KEY)
    if authorization[: len(_BEARER)].lower() != _BEARER:
        return None
    return authorization[len(_BEARER) :].strip()
