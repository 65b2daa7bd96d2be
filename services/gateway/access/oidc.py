"""Tokens of an OpenID Connect provider as callers: issuer, audience, signature, times, then tenant and scopes.

    token ─▶ key of the issuer by its id ─▶ signature ─▶ claims ─▶ tenant, scopes ─▶ Caller

The issuer's public keys are read at the start, every hour, and, at most every ten seconds, for a token that no known
key verifies. While the issuer does not answer, the keys that were read last stay valid. Only asymmetric signatures are
accepted, so an unsigned token, or one signed with a public key as if it were a shared secret, is refused.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import structlog
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from services.contracts.access import Allowance, Caller, Scope
from services.contracts.tenant import DEFAULT_TENANT, OPERATOR, check_tenant
from services.errors import DependencyUnavailable, InvalidRequest, InvalidToken
from services.gateway.access.keyring import Holder
from services.gateway.periodic_task import PeriodicTask

log = structlog.get_logger()

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
_TOKEN = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
_MAX_CHARS = 6_144
"""Of a token. gRPC refuses metadata of more than 8 kB in all, with a probability that grows to 1 at 16 kB."""
_REFRESH_S, _UNKNOWN_KEY_S = 3_600.0, 10.0
_WAIT_S, _FETCH_S = 1.0, 5.0
_LEEWAY_S = 30.0
"""Allowed difference of the issuer's clock."""
_MAX_UNIX_S = 1e12
"""Larger times, infinity and NaN are refused: such a token would never expire."""
_ID_CHARS = 16
_UNREADABLE = (JoseError, LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors for malformed or deeply nested tokens and key sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An OpenID Connect provider: its URL, the audience of our tokens, and the claims with tenant and scopes."""

    url: str
    audience: str
    tenant_claim: str = "tenant"
    scope_claim: str = "scope"


class IssuerKeys:
    """Reads an issuer's keys over HTTP: from its discovery document to its key set."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def __call__(self) -> Mapping[str, Any]:
        """Return the JSON Web Key Set. Raises httpx.HTTPError or ValueError."""
        async with httpx.AsyncClient(timeout=_FETCH_S) as http:
            about = await self._get(http, f"{self._url}/.well-known/openid-configuration")
            if str(about.get("issuer", "")).rstrip("/") != self._url:
                raise ValueError(f"issuer: the provider calls itself {about.get('issuer')!r:.80}; set that URL")
            return await self._get(http, str(about["jwks_uri"]))

    async def _get(self, http: httpx.AsyncClient, url: str) -> Mapping[str, Any]:
        document = (await http.get(url)).raise_for_status().json()
        if not isinstance(document, dict):
            raise TypeError(f"{url}: not a JSON object")
        return document


class TokenVerifier:
    """Verifies the tokens of one issuer."""

    def __init__(self, issuer: Issuer, max_k: int, fetch: IssuerKeys, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._issuer = issuer
        self._max_k = max_k
        self._fetch = fetch
        self._clock = clock
        self._keys: KeySet | None = None
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.is_outdated = False
        """Whether the last read of the issuer's keys failed."""
        self._following = PeriodicTask("issuer keys", self.refresh, _REFRESH_S, at_once=True)

    async def start(self) -> None:
        """Read the keys, and follow them. Call in the serving loop; does not wait for the issuer."""
        self._following.start()

    async def stop(self) -> None:
        """Stop following."""
        await self._following.stop()
        if self._reading is not None:
            self._reading.cancel()

    async def refresh(self) -> None:
        """Read the issuer's keys; without an answer the old keys stay."""
        self._read_s = self._clock()
        try:
            self._keys = _key_set(await self._fetch())
        except (httpx.HTTPError, httpx.InvalidURL, *_UNREADABLE) as error:
            if not self.is_outdated:
                log.error("issuer_keys_unread", issuer=self._issuer.url, error=repr(error)[:200])  # noqa: TRY400
            self.is_outdated = True
            return
        self.is_outdated = False

    async def holder_of(self, token: str, now_unix_s: float) -> Holder:
        """Return the holder of a token.

        Raises InvalidToken, which names the claim and the fix, or DependencyUnavailable until the keys were read once.
        """
        if len(token) > _MAX_CHARS:
            raise InvalidToken("token", f"longer than {_MAX_CHARS} characters", "request fewer claims")
        claims = await self._verified(token)
        self._check_issuer(claims)
        _check_times(claims, now_unix_s)
        subject = _text(claims, "sub")
        tenant, scopes = self._tenant_of(claims), self._scopes_of(claims)
        digest = hashlib.sha256(f"{self._issuer.url} {subject}".encode()).hexdigest()[:_ID_CHARS]
        return Holder(Caller(key_id=f"oidc/{digest}", scopes=scopes, max_k=self._max_k, tenant=tenant), Allowance())

    def unknown_tenant(self) -> InvalidToken:
        """Return the error for a token of a tenant that this stack does not have."""
        fix = "`tailrace tenants list` shows the tenants"
        return InvalidToken(self._issuer.tenant_claim, "not a tenant of this stack", fix)

    async def _verified(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token that the issuer signed; read its keys again if no known key verifies it."""
        _check_form(token)
        claims = self._claims_of(token)
        if claims is None:
            await self._read_again()
            claims = self._claims_of(token)
        if claims is None and self._keys is None:
            raise DependencyUnavailable("the issuer of tokens", _UNKNOWN_KEY_S)
        if claims is None:
            raise InvalidToken("token", "not signed by a key of the issuer", "send a new token, as the issuer gave it")
        return claims

    def _claims_of(self, token: str) -> Mapping[str, Any] | None:
        if self._keys is None:
            return None
        try:
            return jwt.decode(token, self._keys, algorithms=ALGORITHMS).claims
        except _UNREADABLE as error:
            log.info("token_refused", error=type(error).__name__)
            return None

    async def _read_again(self) -> None:
        """Read the keys once for all tokens that wait for it, at most every ten seconds."""
        if self._reading is None or self._reading.done():
            if self._keys is not None and self._clock() - self._read_s < _UNKNOWN_KEY_S:
                return
            self._reading = asyncio.create_task(self.refresh())
        await asyncio.wait({self._reading}, timeout=_WAIT_S)

    def _check_issuer(self, claims: Mapping[str, Any]) -> None:
        if str(claims.get("iss", "")).rstrip("/") != self._issuer.url.rstrip("/"):
            raise InvalidToken("iss", "another issuer", f"request a token of {self._issuer.url}")
        audience = claims.get("aud")
        if self._issuer.audience not in (audience if isinstance(audience, list) else [audience]):
            raise InvalidToken("aud", "another audience", f"request a token for {self._issuer.audience}")

    def _tenant_of(self, claims: Mapping[str, Any]) -> str:
        name = self._issuer.tenant_claim
        tenant = _text(claims, name)
        if tenant == OPERATOR:
            return DEFAULT_TENANT
        try:
            return check_tenant(tenant)
        except InvalidRequest as error:
            raise InvalidToken(name, error.problem, "let the issuer put the tenant's id there") from None

    def _scopes_of(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        name = self._issuer.scope_claim
        sent = _claim(claims, name)
        words = sent.split() if isinstance(sent, str) else sent if isinstance(sent, list) else []
        scopes = frozenset(scope for scope in Scope if scope in words)
        if not scopes:
            raise InvalidToken(name, "no scope of this service", f"grant one or more of {', '.join(Scope)}")
        return scopes


def is_token(text: str) -> bool:
    """Whether a sent key has the form of a JSON Web Token; no API key has a dot."""
    return _TOKEN.fullmatch(text) is not None


def _check_form(token: str) -> None:
    try:
        jws.extract_compact(token.encode())
    except _UNREADABLE:
        raise InvalidToken("token", "not a signed JSON Web Token", "send the token as the issuer gave it") from None


def _key_set(sent: Mapping[str, Any]) -> KeySet:
    """Return the keys of a set that can be read: providers also publish keys of kinds that we do not know.

    Raises LookupError, TypeError or ValueError for a set without any.
    """
    keys: list[Any] = []
    for key in sent["keys"]:
        with suppress(*_UNREADABLE):
            keys += KeySet.import_key_set({"keys": [key]}).keys
    if not keys:
        raise ValueError("no key of the set can be read")
    return KeySet(keys)


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path such as `realm_access.roles` into nested objects."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(claims: Mapping[str, Any], name: str) -> str:
    """Return a claim that must be a text. Raises InvalidToken."""
    value = _claim(claims, name)
    if not isinstance(value, str) or not value:
        raise InvalidToken(name, "missing, or not a text", "let the issuer add it to its tokens")
    return value


def _check_times(claims: Mapping[str, Any], now_unix_s: float) -> None:
    times = {name: float(value) for name in ("exp", "nbf", "iat") if (value := _number(claims, name)) is not None}
    if "exp" not in times:
        raise InvalidToken("exp", "missing", "request a token that expires")
    if now_unix_s >= times["exp"] + _LEEWAY_S:
        raise InvalidToken("exp", "expired", "request a new token")
    for name in ("nbf", "iat"):
        if now_unix_s < times.get(name, now_unix_s) - _LEEWAY_S:
            raise InvalidToken(name, "not valid yet", "check the clocks of the issuer and of this server")


def _number(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is not None and (type(value) not in (int, float) or not abs(value) < _MAX_UNIX_S):
        raise InvalidToken(name, "not a number", "let the issuer send Unix seconds")
    return value
