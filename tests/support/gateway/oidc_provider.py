"""A real OpenID Connect provider, whose users have given claims."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import httpx

from tests.support.servers import HOST, Server

AUDIENCE = "tailrace"


class Provider(Server):
    """The provider on one port; each start has new keys."""

    def __init__(self, folder: Path, claims_of: Mapping[str, Mapping[str, Any]]) -> None:
        users = [json.dumps({"sub": sub, **claims}) for sub, claims in claims_of.items()]
        given = [word for user in users for word in ("--user-claims", user)]
        module = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock"]
        super().__init__(lambda port: [*module, "--port", str(port), "--host", HOST, *given], folder / "provider.log")
        self.url = f"http://{self.address}"

    def token(self, sub: str, audience: str = AUDIENCE) -> str:
        """Return a user's ID token, by the authorization code flow."""
        asked = {"client_id": audience, "redirect_uri": "https://app.test/", "response_type": "code", "scope": "openid"}
        with httpx.Client(base_url=self.url) as http:
            sent = http.post("/oauth2/authorize", params=asked, data={"sub": sub})
            code = parse_qs(urlparse(sent.headers["location"]).query)["code"][0]
            form = {"grant_type": "authorization_code", "code": code, "redirect_uri": asked["redirect_uri"]}
            answer = http.post("/oauth2/token", data=form, auth=(audience, "any"))
            return str(answer.json()["id_token"])

    def public_keys(self) -> dict[str, Any]:
        """Return the published key set."""
        keys: dict[str, Any] = httpx.get(f"{self.url}/jwks").json()
        return keys
