"""A whole stack with keys, TLS and a password for its store, on the bundle of the shared one."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import httpx
import pytest
import trustme

from infra.local.commands.guide import rest_address
from services.contracts import recommend_pb2 as pb
from services.contracts import recommend_pb2_grpc as api
from services.settings.settings import Settings
from tests.support.servers import HOST
from tests.support.stack import Stack
from tests.support.wait import wait_for

AMPLE_MS = 4_000


@dataclass
class Secured:
    """A secured stack's settings, its keys by id, and the authority that its callers trust."""

    settings: Settings
    keys: dict[str, str]
    ca: trustme.CA

    def bearer(self, key_id: str) -> dict[str, str]:
        """Return the header with a key."""
        return {"authorization": f"Bearer {self.keys[key_id]}"}

    def rest(self) -> httpx.Client:
        """Return a client of the REST door."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return httpx.Client(base_url=rest_address(self.settings), verify=context, timeout=20)

    def channel(self) -> grpc.Channel:
        """Return a connection to the gRPC door."""
        return grpc.secure_channel(self.settings.grpc_address, grpc.ssl_channel_credentials(self.ca.cert_pem.bytes()))


@pytest.fixture(scope="module")
def secured(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Start it beside the shared stack, stop it afterwards."""
    folder, ca = tmp_path_factory.mktemp("secured"), trustme.CA()
    (folder / "password").write_text("a,pass=word\n")
    (folder / "tls").mkdir()
    leaf = ca.issue_cert(HOST)
    leaf.cert_chain_pems[0].write_to_path(folder / "tls" / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls" / "tls.key")
    running = stack.beside(
        folder,
        tls_dir=folder / "tls",
        api_keys_file=folder / "keys.json",
        redis_password_file=folder / "password",
        gateway_replicas=1,
    )
    keys = {"shop": running.new_key("shop", "recommend", "events"), "ops": running.new_key("ops", "admin")}
    try:
        running.start()
        yield Secured(running.settings, keys, ca)
    finally:
        running.close()


def test_a_click_over_tls_with_a_key_is_seen_by_the_next_answer(secured: Secured) -> None:
    """Through edge, key, broker, worker, store with a password, and both doors."""
    with secured.rest() as http, secured.channel() as channel:
        clicked = http.post("/v1/events", json={"user_id": "new", "item_id": "50"}, headers=secured.bearer("shop"))
        ask = pb.RecommendRequest(user_id="new", k=5, deadline_ms=AMPLE_MS)
        metadata = list(secured.bearer("shop").items())

        def seen() -> bool:
            """Whether the click is in the answer's history."""
            answer = api.RecommenderStub(channel).Recommend(ask, metadata=metadata)
            return answer.HasField("newest_event_time_ms")

        wait_for(seen, 30, "an answer that has seen the click")
        rest = http.post("/v1/recommendations", json={"user_id": "new", "k": 5}, headers=secured.bearer("shop"))

    assert clicked.status_code == 200
    assert len(rest.json()["items"]) == 5


def test_without_a_key_only_probes_and_the_document_are_open(secured: Secured) -> None:
    """At both doors of the running stack; metrics need the scope admin."""
    with secured.rest() as http, secured.channel() as channel:
        statuses = {
            path: http.get(path).status_code
            for path in ("/healthz", "/readyz", "/v1/bundle", "/metrics", "/openapi.json")
        }
        with pytest.raises(grpc.RpcError) as refused:
            api.RecommenderStub(channel).Recommend(pb.RecommendRequest(user_id="1"))
        forbidden = http.get("/metrics", headers=secured.bearer("shop")).status_code
        allowed = http.get("/metrics", headers=secured.bearer("ops")).status_code

    assert statuses == {"/healthz": 200, "/readyz": 200, "/v1/bundle": 401, "/metrics": 401, "/openapi.json": 200}
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (forbidden, allowed) == (403, 200)
