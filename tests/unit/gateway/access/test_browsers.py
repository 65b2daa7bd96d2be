"""Protection of a server without keys against requests from pages of other sites."""

import asyncio
from dataclasses import replace

import pytest

from services.contracts.access import Scope
from services.errors import InvalidRequest
from services.gateway.access.authorize import open_to_all
from services.gateway.call.headers import Call
from services.gateway.call.operations import POPULAR

ACCESS = open_to_all(10, frozenset({"shop.internal"}))
HERE = "localhost:8000"


def refused_field(scope: Scope, **headers: str) -> str | None:
    """Return the header named by a call's rejection, or None if the call is admitted."""
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        asyncio.run(ACCESS.authorize(Call("r"), sent, replace(POPULAR, scope=scope)))
    except InvalidRequest as error:
        return error.field
    return None


OURS = (HERE, "LOCALHOST", "app.localhost:1", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "Shop.Internal.:80")
OTHERS = ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "shop.internal.evil", "x:y:z", "")
BROKEN = ("[", "[::1", "[localhost]")


@pytest.mark.parametrize("scope", Scope)
def test_a_name_that_is_not_ours_is_refused(scope: Scope) -> None:
    """DNS rebinding: foreign host names that resolve to this machine are rejected; addresses and our names pass."""
    assert [host for host in OURS if refused_field(scope, host=host)] == []
    assert [host for host in OTHERS + BROKEN if refused_field(scope, host=host) != "host"] == []
    assert refused_field(scope) is None


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"sec_fetch_site": "cross-site"}, "sec-fetch-site"),
        ({"sec_fetch_site": "same-site", "origin": f"http://{HERE}"}, "sec-fetch-site"),
        ({"origin": "http://evil.example"}, "origin"),
        ({"origin": "http://localhost:8001"}, "origin"),
        ({"origin": "null"}, "origin"),
        ({"origin": "http://["}, "origin"),
        ({"origin": f"https://{HERE}"}, None),
        ({"sec_fetch_site": "same-origin", "origin": f"http://{HERE}"}, None),
        ({"sec_fetch_site": "none"}, None),
        ({}, None),
    ],
)
def test_another_sites_post_is_refused_where_it_changes_something(headers: dict[str, str], field: str | None) -> None:
    """Calls that write (events, items, erasures, admin) reject cross-site requests; read-only calls accept them."""
    for scope in Scope:
        expected = field if scope in {Scope.EVENTS, Scope.ITEMS, Scope.ERASE, Scope.ADMIN} else None
        assert refused_field(scope, host=HERE, **headers) == expected
