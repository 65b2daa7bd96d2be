"""Tokens of a real OpenID Connect provider at both doors: admitted as their tenant, or refused by claim and fix."""

import base64
import hmac
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws, jwt
from joserfc.jwk import KeySet, RSAKey

from models.registry.store import BundleStore
from services.contracts.access import Scope
from services.contracts.tenant import TenantState, scoped
from services.errors import DependencyUnavailable, InvalidToken
from services.gateway.access.authorize import KeyedAccess
from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.oidc import Issuer, IssuerKeys, TokenVerifier
from services.gateway.access.shared_rates import SharedRates
from services.gateway.access.tenants import (
    FollowedTenants,
    StoredTenant,
    TenantsFile,
    read_tenants,
    write_tenants,
)
from services.gateway.console.releases import add_releases
from services.gateway.rest.door import create_rest_app
from tests.support.gateway.fakes import FakeLlm
from tests.support.gateway.keys import bearer, stored_key
from tests.support.gateway.oidc_provider import AUDIENCE, Provider
from tests.support.wait import until, until_answer
from tests.unit.gateway.clients import Door, in_process
from tests.unit.gateway.world import MAX_BODY_BYTES, World, add_version, catalogue_of, make_world, publish, user

CLAIMS: dict[str, dict[str, Any]] = {
    "shop": {"tenant": "acme", "scope": "recommend events openid"},
    "listed": {"tenant": "acme", "scope": ["recommend"]},
    "chief": {"tenant": "operator", "scope": "admin recommend"},
    "reader": {"tenant": "acme", "scope": "text"},
    "nobody": {"scope": "recommend"},
    "guest": {"tenant": "acme", "scope": "openid profile"},
    "wrong": {"tenant": "Ac me", "scope": "recommend"},
    "stranger": {"tenant": "unknown", "scope": "recommend"},
}
ASKED = {"user_id": "long", "k": 2, "deadline_ms": 4_000}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """A running provider."""
    with Provider(tmp_path_factory.mktemp("provider"), CLAIMS) as made:
        yield made


def access_to(folder: Path, verifier: TokenVerifier) -> KeyedAccess:
    """Return access control with one key and this verifier."""
    write_keys(folder / "keys.json", KeysFile(keys=(stored_key("key", *Scope),)))
    write_tenants(folder / "tenants.json", TenantsFile(tenants=(StoredTenant(id="acme", max_k=5),)))
    tenants = FollowedTenants(folder / "tenants.json")
    return KeyedAccess(KeyRing(folder / "keys.json", 100), tenants, SharedRates(), tokens=verifier)


def verifier_of(provider: Provider, now_s: list[float] | None = None) -> TokenVerifier:
    """Return a verifier of the provider's tokens; `now_s` is its clock."""
    clock = now_s or [0.0]
    return TokenVerifier(Issuer(url=provider.url, audience=AUDIENCE), 100, IssuerKeys(provider.url), lambda: clock[0])


@pytest.fixture
async def access(tmp_path: Path, provider: Provider) -> AsyncIterator[KeyedAccess]:
    """The doors' access control, which follows the provider."""
    made = access_to(tmp_path, verifier_of(provider))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A stack with a bundle for the default tenant and one for acme."""
    publish(tmp_path / "bundles", "v1", catalogue_of())
    add_version(tmp_path / "bundles", "acme-v1", catalogue_of())
    BundleStore(tmp_path / "bundles", "acme.default").promote("acme-v1")
    made = make_world(tmp_path / "bundles", others={"acme.default": FakeLlm(["i11", "i12"], "acme-v1")})
    made.features.users[scoped("acme", "long")] = user("i00", "i01", "i02")
    await made.plane.start()
    yield made
    await made.plane.stop()


async def test_a_token_is_worth_its_tenant_and_scopes(provider: Provider, door: Door) -> None:
    """Both claims decide as a key would; keys are valid as before."""
    tokens = {sub: provider.token(sub) for sub in ("shop", "listed", "chief", "reader")}

    answers = {sub: await door.recommend(ASKED, bearer(token)) for sub, token in tokens.items()}
    events = [{"user_id": "u", "item_id": "i00"}]
    recorded = [(await door.record(events, bearer(tokens[sub]))).code for sub in ("shop", "listed")]

    assert [answers[sub].body["bundle_version"] for sub in ("shop", "listed", "chief")] == ["acme-v1", "acme-v1", "v1"]
    assert answers["reader"].code == "not_allowed"
    assert recorded == ["ok", "not_allowed"]
    assert (await door.recommend({**ASKED, "k": 6}, bearer(tokens["shop"]))).code == "invalid_request"
    assert (await door.recommend(ASKED, bearer("key"))).body["bundle_version"] == "v1"


async def test_the_operator_s_token_opens_the_console_and_a_tenant_s_does_not(
    provider: Provider, world: World, access: KeyedAccess, tmp_path: Path
) -> None:
    """Calls about the whole stack need a token of the default tenant, at the console as for metrics."""
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=access)
    add_releases(app, BundleStore(tmp_path / "bundles"), 10.0, lambda: 0.0)
    headers = [bearer(provider.token("chief")), bearer(provider.token("shop")), {}]
    async with in_process(app) as http:
        statuses = {
            path: [(await http.get(path, headers=bearer_headers)).status_code for bearer_headers in headers]
            for path in ("/metrics", "/console/names")
        }

    assert statuses == {"/metrics": [200, 403, 401], "/console/names": [200, 403, 401]}


async def test_a_valid_token_follows_the_state_of_its_tenant(provider: Provider, door: Door, tmp_path: Path) -> None:
    """While a token is valid, its tenant is suspended, resumed and deleted: each holds within seconds."""
    headers, path = bearer(provider.token("shop")), tmp_path / "tenants.json"

    async def code() -> str | None:
        return (await door.recommend(ASKED, headers)).code

    for state, expected in (
        (TenantState.SUSPENDED, "not_allowed"),
        (TenantState.ACTIVE, "ok"),
        (TenantState.DELETED, "unauthenticated"),
    ):
        write_tenants(path, read_tenants(path).with_changed("acme", state=state))
        await until_answer(code, expected.__eq__, 10.0)


@pytest.mark.parametrize(
    ("sub", "claim"), [("nobody", "tenant"), ("wrong", "tenant"), ("stranger", "tenant"), ("guest", "scope")]
)
async def test_a_claim_that_is_missing_or_wrong_is_named(provider: Provider, door: Door, sub: str, claim: str) -> None:
    """The error has the claim and what to do."""
    refused = await door.recommend(ASKED, bearer(provider.token(sub)))

    assert refused.code == "unauthenticated"
    assert refused.message.startswith(f"{claim}: ")
    assert "; " in refused.message


async def test_a_token_for_another_audience_is_refused(provider: Provider, door: Door) -> None:
    """The gateway refuses a token that the provider issued for another application."""
    refused = await door.recommend(ASKED, bearer(provider.token("shop", "other-app")))

    assert (refused.code, refused.message.partition(":")[0]) == ("unauthenticated", "aud")


def forged(provider: Provider, kind: str) -> str:
    """Return a token whose claims are right and whose signature is not the provider's."""
    token = provider.token("shop")
    header, body, signature = token.split(".")
    claims, keys = json.loads(base64.urlsafe_b64decode(body + "==")), provider.public_keys()
    key_id = KeySet.import_key_set(keys).keys[0].kid  # type: ignore[arg-type]
    if kind == "alg none":
        head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": key_id}).encode()).rstrip(b"=").decode()
        return f"{head}.{body}."
    if kind == "key confusion":
        public = RSAKey.import_key(keys["keys"][0]).as_pem(private=False)
        head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": key_id}).encode()).rstrip(b"=").decode()
        code = hmac.digest(public, f"{head}.{body}".encode(), "sha256")
        return f"{head}.{body}.{base64.urlsafe_b64encode(code).rstrip(b'=').decode()}"
    if kind == "another key":
        return jwt.encode({"alg": "RS256", "kid": key_id}, claims, RSAKey.generate_key(2_048))
    if kind == "unknown key":
        return jwt.encode({"alg": "RS256", "kid": "other"}, claims, RSAKey.generate_key(2_048))
    if kind == "changed claims":
        changed = base64.urlsafe_b64encode(json.dumps({**claims, "tenant": "bolt"}).encode()).rstrip(b"=").decode()
        return f"{header}.{changed}.{signature}"
    return {"no JSON": f"a.b.{signature}", "long": f"{token}{'A' * 6_144}"}[kind]


@pytest.mark.parametrize(
    "kind", ["alg none", "key confusion", "another key", "unknown key", "changed claims", "no JSON", "long"]
)
async def test_a_forged_token_is_refused(provider: Provider, door: Door, kind: str) -> None:
    """A token is refused if it is unsigned, changed, or signed by another key or with the public key as a secret."""
    refused = await door.recommend(ASKED, bearer(forged(provider, kind)))

    assert refused.code == "unauthenticated"
    assert refused.message.startswith("token: ")


@pytest.mark.parametrize(("shift_s", "claim"), [(2 * 3_600, "exp"), (-3_600, "iat")])
async def test_a_token_is_valid_in_its_time_only(provider: Provider, shift_s: float, claim: str) -> None:
    """An expired token, and one from the future, are refused; a clock that differs by seconds is accepted."""
    verifier, token = verifier_of(provider), provider.token("shop")
    await verifier.refresh()
    issued_s = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))["iat"]

    assert (await verifier.holder_of(token, issued_s - 10)).caller.tenant == "acme"
    with pytest.raises(InvalidToken, match=f"^{claim}: "):
        await verifier.holder_of(token, issued_s + shift_s)


ISSUER = "https://issuer.test"
KEY = RSAKey.generate_key(2_048, {"kid": "k"})


def verifier_by(keys: list[Any], **names: str) -> TokenVerifier:
    """Return a verifier whose issuer publishes these keys; `names` are its claims."""

    async def published() -> dict[str, Any]:
        """Return the key set."""
        return {"keys": keys}

    return TokenVerifier(Issuer(url=ISSUER, audience=AUDIENCE, **names), 100, published, lambda: 0.0)


def signed(**claims: Any) -> str:
    """Return a token of KEY with these claims in addition to the required claims."""
    needed = {"iss": ISSUER, "aud": ["other", AUDIENCE], "sub": "s", "exp": 2e9, "tenant": "acme", "scope": "recommend"}
    return jwt.encode({"alg": "RS256", "kid": "k"}, needed | claims, KEY)


UNKNOWN_CURVE = {"kty": "OKP", "crv": "X9", "x": "AA", "kid": "new"}


@pytest.mark.parametrize("other", [UNKNOWN_CURVE, {"kty": "RSA", "kid": "cut", "n": "AA"}, None, "k"])
async def test_a_key_that_cannot_be_read_leaves_the_others_valid(other: Any) -> None:
    """A provider announces a key of a new kind next to the key that signs."""
    verifier = verifier_by([other, KEY.as_dict(private=False)])

    assert (await verifier.holder_of(signed(), 1e9)).caller.tenant == "acme"
    assert not verifier.is_outdated


@pytest.mark.parametrize("claims", [{"org": {"shop": {"id": "acme"}}}, {"org.shop.id": "acme"}])
async def test_a_claim_is_found_by_its_name_or_by_its_path(claims: dict[str, Any]) -> None:
    """Keycloak nests claims; other providers have dots in names."""
    verifier = verifier_by([KEY.as_dict(private=False)], tenant_claim="org.shop.id", scope_claim="roles.of.api")
    token = signed(roles={"of": {"api": ["recommend", {"a": 1}, None, ["events"]]}}, **claims)

    caller = (await verifier.holder_of(token, 1e9)).caller

    assert (caller.tenant, caller.scopes) == ("acme", frozenset([Scope.RECOMMEND]))


async def test_claims_nested_too_deeply_are_refused() -> None:
    """A token whose claims cannot be read is refused like one that is not signed."""
    body = b'{"a":' + b"[" * 2_000 + b"]" * 2_000 + b"}"
    token = jws.serialize_compact({"alg": "RS256", "kid": "k"}, body, KEY)

    with pytest.raises(InvalidToken, match=r"^token: "):
        await verifier_by([KEY.as_dict(private=False)]).holder_of(token, 1e9)


@pytest.mark.parametrize("expires", [float("nan"), float("inf"), 10**400, True, "soon"])
async def test_a_time_that_is_no_time_admits_nobody(expires: Any) -> None:
    """A signed token whose end is NaN or infinite would never expire, and is refused by its claim."""
    with pytest.raises(InvalidToken, match=r"^exp: "):
        await verifier_by([KEY.as_dict(private=False)]).holder_of(signed(exp=expires), 1e9)


async def test_keys_rotate_and_outlive_the_provider(tmp_path: Path) -> None:
    """New keys are read when a token names them; while the provider is away the known keys stay valid."""
    provider, clock = Provider(tmp_path, CLAIMS), [0.0]
    provider.start()
    verifier = verifier_of(provider, clock)
    await verifier.start()
    old = provider.token("shop")
    await until(lambda: verifier._keys is not None)
    provider.kill()
    provider.start()
    new = provider.token("shop")
    now_s = json.loads(base64.urlsafe_b64decode(new.split(".")[1] + "=="))["iat"]

    clock[0] = 60.0
    assert (await verifier.holder_of(new, now_s)).caller.tenant == "acme"
    with pytest.raises(InvalidToken, match=r"^token: not signed"):
        await verifier.holder_of(old, now_s)
    provider.kill()
    clock[0] = 120.0
    await verifier.refresh()

    assert verifier.is_outdated
    assert (await verifier.holder_of(new, now_s)).caller.tenant == "acme"
    await verifier.stop()


async def test_a_provider_that_never_answered_admits_nobody(tmp_path: Path) -> None:
    """A gateway starts without the provider; until its keys were read, a token may be valid: callers try again."""
    provider = Provider(tmp_path, CLAIMS)
    verifier = verifier_of(provider)

    await verifier.refresh()
    with pytest.raises(DependencyUnavailable):
        await verifier.holder_of("eyJhbGciOiJSUzI1NiJ9.e30.AAAA", 0.0)
