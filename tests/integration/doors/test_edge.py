"""TLS at the edge: the real edge process and certificates, in front of real REST and gRPC servers on fakes."""

import http.client
import json
import re
import shutil
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx
import pytest
import trustme

from benchmarks.load.recommender_stub import RecommenderStub
from infra.local.edge.admin import edge_answers, num_refused, send
from infra.local.edge.config import KEY_SHARES, edge_folder
from services.contracts import recommend_pb2 as pb
from services.contracts.access import Priority, Scope
from services.gateway.access.keys import KeysFile, write_keys
from services.gateway.access.tenants import StoredTenant, TenantsFile, write_tenants
from services.gateway.overload.monitor import DOORS
from services.settings.settings import Settings
from tailrace_client import Client, TailraceError, Tls
from tests.support.gateway.edge_scene import EdgeScene
from tests.support.gateway.keys import bearer, stored_key
from tests.support.gateway.plain_doors import running_plain_doors
from tests.support.gateway.tls_proxy import issue
from tests.support.servers import HOST
from tests.support.wait import wait_for
from tests.unit.gateway.call.test_path import NOT_UTF8, OPENAI, TAILRACE

REQUEST = {"user_id": "nobody", "k": 2}
LONG = {"user_id": "long", "k": 2, "deadline_ms": 5_000}
KEYS = KeysFile(
    keys=tuple(stored_key(priority.name.lower(), Scope.RECOMMEND, priority=priority) for priority in reversed(Priority))
)
"""Keys named by their priority; the gateway behind the edge admits every caller."""


@dataclass
class Edge:
    """A running edge and its clients."""

    settings: Settings
    ca: trustme.CA

    @property
    def rest(self) -> str:
        return f"https://localhost:{self.settings.http_port}"

    def context(self, ca: trustme.CA | None = None, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """Build the TLS context of a client."""
        context = ssl.create_default_context()
        (ca or self.ca).configure_trust(context)
        if client is not None:
            client.configure_cert(context)
        return context

    def call_rest(self, context: ssl.SSLContext, path: str = "/healthz") -> httpx.Response:
        with httpx.Client(verify=context, timeout=10) as http:
            return http.get(self.rest + path)

    def post(self, target: str, plain_port: int | None = None) -> tuple[int, dict[str, Any]]:
        """Post to an unnormalised target, or to a port behind the edge; return status and error."""
        line = (
            http.client.HTTPSConnection("localhost", self.settings.http_port, context=self.context())
            if plain_port is None
            else http.client.HTTPConnection(HOST, plain_port)
        )
        with closing(line):
            line.request("POST", target)
            answer = line.getresponse()
            return answer.status, json.loads(answer.read())["error"]

    def announced(self) -> str | None:
        """Return HAProxy's limit per port, if both are equal."""
        both = [send(edge_folder(self.settings.state_dir), f"get var proc.limit_{door}") for door in DOORS]
        limits = {answer.rpartition("<")[2].removesuffix(">") if "<" in answer else None for answer in both}
        return limits.pop() if len(limits) == 1 else None

    def num_in_flight(self) -> int:
        """Return the number of recommendations that HAProxy counts."""
        table = send(edge_folder(self.settings.state_dir), "show table in_flight")
        return sum(map(int, re.findall(r"conn_cur=(\d+)", table)))

    def shares(self) -> list[str]:
        """Return the limit fractions of the keys in HAProxy, in the file's order."""
        rows = send(edge_folder(self.settings.state_dir), f"show map {KEY_SHARES}").splitlines()
        return [row.split()[-1] for row in rows if row.strip()]

    def call_grpc(
        self,
        ca: trustme.CA | None = None,
        client: trustme.LeafCert | None = None,
        metadata: dict[str, str] | None = None,
        request: dict[str, Any] = REQUEST,
        method: str = "Recommend",
    ) -> Any:
        """Make one call over a new connection."""
        shown = {}
        if client is not None:
            chain = b"".join(pem.bytes() for pem in client.cert_chain_pems)
            shown = {"private_key": client.private_key_pem.bytes(), "certificate_chain": chain}
        credentials = grpc.ssl_channel_credentials((ca or self.ca).cert_pem.bytes(), **shown)
        with grpc.secure_channel(f"localhost:{self.settings.grpc_port}", credentials) as channel:
            message = getattr(pb, f"{method}Request")(**request)
            return getattr(RecommenderStub(channel), method)(
                message, timeout=5, metadata=tuple((metadata or {}).items())
            )

    def selected(self, protocol: str) -> str | None:
        """Return the protocol that the REST port selects from this offer."""
        context = self.context()
        context.set_alpn_protocols([protocol])
        with (
            socket.create_connection((HOST, self.settings.http_port)) as line,
            context.wrap_socket(line, server_hostname="localhost") as wrapped,
        ):
            return wrapped.selected_alpn_protocol()

    def serial(self) -> int:
        """Return the serial number of the certificate of new connections."""
        from cryptography import x509

        pem = ssl.get_server_certificate((HOST, self.settings.http_port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    """The authority that clients trust."""
    return trustme.CA()


@pytest.fixture(scope="module")
def doors() -> Iterator[tuple[int, int]]:
    """Plain REST and gRPC in a separate process; returns their ports."""
    with running_plain_doors() as ports:
        yield ports


@contextmanager
def running_edge(
    folder: Path,
    ca: trustme.CA,
    doors: tuple[int, int],
    client_ca: trustme.CA | None = None,
    keys: KeysFile = KEYS,
    tenants: TenantsFile | None = None,
) -> Iterator[Edge]:
    """Run the edge in front of these ports, with TLS and keys."""
    folder.mkdir(parents=True, exist_ok=True)
    issue(ca, folder / "tls")
    write_keys(folder / "keys.json", keys)
    given: dict[str, Any] = {"inner_http_port": doors[0], "inner_grpc_port": doors[1], "standby": False}
    given |= {"api_keys_file": folder / "keys.json", "tls_dir": folder / "tls"}
    if tenants:
        given["tenants_file"] = folder / "tenants.json"
        write_tenants(given["tenants_file"], tenants)
    if client_ca:
        given["tls_client_ca_file"] = folder / "client ca.crt"
        client_ca.cert_pem.write_to_path(given["tls_client_ca_file"])
    scene = EdgeScene(folder / "state", given)
    scene.start_edge()
    try:
        wait_for(lambda: edge_answers(edge_folder(scene.folder)), what="the edge")
        yield Edge(scene.settings, ca)
    finally:
        scene.children["edge"].terminate()
        assert scene.children["edge"].wait(timeout=60) == 0, (scene.folder / "edge.log").read_text()


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA, doors: tuple[int, int]) -> Iterator[Edge]:
    """An edge without client certificates, in a folder with a blank in its name and a long path."""
    folder = tmp_path_factory.mktemp("a folder whose path is longer than a unix socket may be " + "x" * 60)
    with running_edge(folder, ca, doors) as running:
        yield running


def test_both_doors_answer_over_tls(edge: Edge) -> None:
    """REST and gRPC answer over TLS, REST in both versions of HTTP."""
    rest = edge.call_rest(edge.context())
    rpc = edge.call_grpc()

    assert rest.json() == {"status": "ok"}
    assert rest.http_version == "HTTP/1.1"
    assert rpc.bundle_version == "v1"
    assert [edge.selected(protocol) for protocol in ("h2", "http/1.1")] == ["h2", "http/1.1"]


class BrokenDoor(BaseHTTPRequestHandler):
    """A gateway that passes its health check and answers in no form of HTTP."""

    def do_GET(self) -> None:
        """Answer."""
        if self.path == "/healthz":
            self.send_response(200)
            self.end_headers()
        else:
            self.wfile.write(b"no HTTP at all\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_broken_answer_of_a_gateway_becomes_the_platform_s_error(tmp_path: Path, ca: trustme.CA) -> None:
    """HAProxy refuses such an answer; the caller gets JSON with the request's id."""
    with ThreadingHTTPServer((HOST, 0), BrokenDoor) as door:
        Thread(target=door.serve_forever, daemon=True).start()
        with (
            running_edge(tmp_path, ca, (door.server_port, door.server_port)) as edge,
            httpx.Client(verify=edge.context(), timeout=10) as http,
        ):
            wait_for(lambda: http.get(f"{edge.rest}/").status_code != 503, what="the health checks")
            answer = http.get(f"{edge.rest}/", headers={"x-request-id": "mine"})
        door.shutdown()

    assert answer.status_code == 502
    assert (answer.json()["error"]["code"], answer.json()["error"]["request_id"]) == ("unavailable", "mine")


def test_beyond_the_announced_limit_the_edge_refuses_at_once(edge: Edge) -> None:
    """With two of four permitted requests in flight per port, low priority (half) is refused and high passes, marked.

    The limit comes with the health checks, so that it holds without REST traffic; a limit that is not a number limits
    nothing.
    """
    with httpx.Client(verify=edge.context(), timeout=10, base_url=edge.rest) as http, ThreadPoolExecutor(11) as pool:

        def announce(text: str) -> None:
            assert http.get(f"/limit/{text}").headers.get("x-edge-limit") is None
            wait_for(lambda: edge.announced() == (text if text.isdecimal() else "0"), what=f"the limit {text}")

        def ask(priority: str) -> httpx.Response:
            return http.post("/v1/recommendations", json=LONG, headers=bearer(priority))

        announce("4")
        admitted = [pool.submit(ask, "high") for _ in range(2)]
        calls = [pool.submit(edge.call_grpc, metadata=bearer("high"), request=LONG) for _ in range(2)]
        wait_for(lambda: edge.num_in_flight() == 4, what="two in flight through each door")
        refused = list(pool.map(ask, ["low", "low", "unknown"]))
        with pytest.raises(grpc.RpcError) as rpc:
            edge.call_grpc(metadata=bearer("low"))
        passed = edge.call_grpc(metadata=bearer("high"))
        marked = http.get("/v1/items/headers/similar", headers=bearer("high")).json()
        assert not any(answer.done() for answer in admitted)
        announce("none")
        wait_for(lambda: edge.num_in_flight() == 0, what="none in flight")
        unlimited = list(pool.map(ask, ["low"] * 6))

    assert [answer.status_code for answer in refused] == [429] * 3
    assert {(answer.json()["error"]["code"], answer.headers["retry-after"]) for answer in refused} == {
        ("overloaded", "1")
    }
    assert rpc.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert num_refused(edge_folder(edge.settings.state_dir)) == 4
    assert passed.bundle_version == "v1"
    assert marked["x-edge-refused"] == "low"
    assert [answer.result().status_code for answer in admitted] == [200, 200]
    assert [call.result().bundle_version for call in calls] == ["v1", "v1"]
    assert [answer.status_code for answer in unlimited] == [200] * 6


@pytest.mark.parametrize(("limit", "mark"), [(1, "high"), (3, "normal"), (4, "low")])
def test_the_gateways_learn_the_highest_priority_that_the_edge_refuses(edge: Edge, limit: int, mark: str) -> None:
    """With two in flight, a limit of 1 refuses all priorities, 3 normal and low, 4 low; the highest is marked."""
    with httpx.Client(verify=edge.context(), timeout=10, base_url=edge.rest) as http, ThreadPoolExecutor(2) as pool:

        def ask(priority: str) -> httpx.Response:
            return http.post("/v1/recommendations", json=LONG, headers=bearer(priority))

        time.sleep(1.1)  # the edge counts refusals of the last second
        http.get("/limit/100")
        admitted = [pool.submit(ask, "high") for _ in range(2)]
        wait_for(lambda: edge.num_in_flight() == 2, what="two in flight")
        http.get(f"/limit/{limit}")
        wait_for(lambda: edge.announced() == str(limit), what="the limit")
        refused = ("low", "normal", "high")[: 1 + ("low", "normal", "high").index(mark)]
        answers = [ask(priority).status_code for priority in refused]
        http.get("/limit/none")
        wait_for(lambda: edge.announced() == "0", what="no limit")
        marked = http.get("/v1/items/headers/similar", headers=bearer("high")).json()

    assert answers == [429] * len(refused)
    assert marked["x-edge-refused"] == mark
    assert [answer.result().status_code for answer in admitted] == [200, 200]


@contextmanager
def two_tenants(
    folder: Path, ca: trustme.CA, doors: tuple[int, int]
) -> Iterator[tuple[Edge, httpx.Client, Callable[[str], httpx.Response]]]:
    """An edge with the keys of two tenants, a client, and a function that asks as a tenant."""
    keys = KeysFile(keys=tuple(stored_key(tenant, Scope.RECOMMEND, tenant=tenant) for tenant in ("acme", "bolt")))
    tenants = TenantsFile(tenants=(StoredTenant(id="acme"), StoredTenant(id="bolt")))
    with (
        running_edge(folder, ca, doors, keys=keys, tenants=tenants) as edge,
        httpx.Client(verify=edge.context(), timeout=10, base_url=edge.rest) as http,
    ):
        yield edge, http, lambda tenant: http.post("/v1/recommendations", json=LONG, headers=bearer(tenant))


def test_a_tenant_above_its_share_is_refused_and_the_others_pass(
    tmp_path: Path, ca: trustme.CA, doors: tuple[int, int]
) -> None:
    """At the limit only tenants with more than their share in flight are refused; weights count at once."""
    with two_tenants(tmp_path / "edge", ca, doors) as (edge, http, ask), ThreadPoolExecutor(12) as pool:
        http.get("/limit/4")
        wait_for(lambda: edge.announced() == "4", what="the limit")
        flood = [pool.submit(ask, "acme") for _ in range(3)]
        wait_for(lambda: edge.num_in_flight() == 3, what="a flood within the limit")
        own = [pool.submit(ask, "bolt")]
        wait_for(lambda: edge.num_in_flight() == 4, what="the limit in flight")
        refused = ask("acme")
        own += [pool.submit(ask, "bolt")]
        wait_for(lambda: edge.num_in_flight() == 5, what="one more of the tenant within its share")
        http.get("/limit/none")
        answers = [future.result() for future in flood + own]

    assert refused.status_code == 429
    assert [answer.status_code for answer in answers] == [200] * 5


def test_a_tenant_beyond_twice_the_fair_limit_is_refused(
    tmp_path: Path, ca: trustme.CA, doors: tuple[int, int]
) -> None:
    """The fair limit holds below the limit, and only for the tenant with as many in flight.

    While no other tenant sends requests, a tenant may have more in flight.
    """
    with two_tenants(tmp_path / "edge", ca, doors) as (edge, http, ask), ThreadPoolExecutor(24) as pool:
        http.get("/limit/99,2")
        wait_for(lambda: edge.announced() == "99", what="the limit")
        flood = [pool.submit(ask, "acme") for _ in range(4)]
        wait_for(lambda: edge.num_in_flight() == 4, what="a tenant alone beyond the fair limit")
        own = [pool.submit(ask, "bolt")]
        wait_for(lambda: edge.num_in_flight() == 5, what="the other tenant's request")
        refused = list(pool.map(ask, ["acme"] * 8))
        num_counted = num_refused(edge_folder(edge.settings.state_dir))
        own += [pool.submit(ask, "bolt")]
        wait_for(lambda: edge.num_in_flight() == 6, what="one more of the other tenant")
        http.get("/limit/none")
        answers = [future.result() for future in flood + own]

    assert {answer.status_code for answer in refused} == {429}
    assert num_counted == len(refused)
    assert [answer.status_code for answer in answers] == [200] * 6


def test_a_flood_has_no_more_than_the_fair_limit_in_flight(
    tmp_path: Path, ca: trustme.CA, doors: tuple[int, int]
) -> None:
    """Requests beyond it are refused; the other tenant's requests are answered."""
    with two_tenants(tmp_path / "edge", ca, doors) as (edge, http, ask), ThreadPoolExecutor(24) as pool:
        http.get("/limit/99,2")
        wait_for(lambda: edge.announced() == "99", what="the limit")
        own = [pool.submit(ask, "bolt")]
        wait_for(lambda: edge.num_in_flight() == 1, what="the other tenant's request")
        flood = [pool.submit(ask, "acme") for _ in range(16)]
        wait_for(lambda: sum(future.done() for future in flood) == 14, what="the refusals")
        own += [pool.submit(ask, "bolt") for _ in range(3)]
        answers = [future.result().status_code for future in (*flood, *own)]

    assert Counter(answers) == {200: 6, 429: 14}


@pytest.mark.parametrize("door", ["rest", "grpc"])
def test_a_call_of_many_requests_counts_as_as_many(edge: Edge, door: str) -> None:
    """A batch counts by its size; without a size it counts as 100, and passes only without other requests in flight."""
    whole = {
        "requests": [{name: value for name, value in LONG.items() if name != "deadline_ms"}] * 5,
        "deadline_ms": 5_000,
    }
    with httpx.Client(verify=edge.context(), timeout=10, base_url=edge.rest) as http, ThreadPoolExecutor(4) as pool:

        def ask(size: int | None) -> str:
            named = bearer("high") | ({} if size is None else {"x-batch-size": str(size)})
            if door == "rest":
                path, body = ("/v1/recommendations", LONG) if size == 1 else ("/v1/recommendations:batch", whole)
                return str(http.post(path, json=body, headers=bearer("high") if size == 1 else named).status_code)
            try:
                if size == 1:
                    edge.call_grpc(metadata=bearer("high"), request=LONG)
                else:
                    edge.call_grpc(metadata=named, request=whole, method="RecommendBatch")
            except grpc.RpcError as error:
                return str(error.code().value[0])
            return "ok"

        http.get("/limit/6")
        wait_for(lambda: edge.announced() == "6", what="the limit")
        batch = pool.submit(ask, 5)
        wait_for(
            lambda: batch.done() or edge.num_in_flight() == 2,
            what="the batch: its first, and the bit of the other four",
        )
        assert not batch.done(), batch.result()
        single = pool.submit(ask, 1)
        wait_for(lambda: edge.num_in_flight() == 3, what="one more")
        refused = [ask(size) for size in (1, 5, None)]
        assert [batch.done(), single.done()] == [False, False]
        finished = [batch.result(), single.result()]
        alone = ask(None)
        http.get("/limit/none")

    passed, over = ("200", "429") if door == "rest" else ("ok", "8")
    assert refused == [over] * 3
    assert [*finished, alone] == [passed] * 3


@pytest.mark.parametrize("paths", [TAILRACE, OPENAI, ["http://localhost/v1/%65vents", "http://localhost//v1/events"]])
def test_an_ambiguous_path_is_refused_by_the_edge_and_the_door_alike(edge: Edge, paths: list[str]) -> None:
    """Refusals use one envelope; the edge forwards only paths whose parameter is invalid UTF-8."""
    for path in paths:
        refused, refused_behind = edge.post(path), edge.post(path, edge.settings.inner_http_port)

        ids = [error.pop("request_id", "") for _, error in (refused, refused_behind)]
        assert refused == refused_behind, path
        assert refused[0] == 400
        assert not ids[0] or "-" in ids[0] or path in NOT_UTF8, "an id of the door's"


def test_other_paths_reach_the_door_as_they_are(edge: Edge) -> None:
    """A parameter may be encoded, and a target absolute; similar paths and encoded gRPC paths are rejected."""
    passed = [edge.post(path) for path in ("/v1/events", f"{edge.rest}/v1/events?a=%2F..//")]
    unknown = [edge.post(path)[0] for path in ("/v1/events/", "/v1/events;a=1", "/V1/events", "/v1\\events")]
    encoded = edge.call_rest(edge.context(), "/v1/explanations/a%2Fb%252F")
    credentials = grpc.ssl_channel_credentials(edge.ca.cert_pem.bytes())
    with (
        grpc.secure_channel(f"localhost:{edge.settings.grpc_port}", credentials) as channel,
        pytest.raises(grpc.RpcError) as rpc,
    ):
        channel.unary_unary("/tailrace.v1.Recommender/R%65commend")(b"", timeout=5)

    assert [(status, error["field"]) for status, error in passed] == [(422, "body"), (422, "a")]
    assert unknown == [404] * 4
    assert (encoded.status_code, encoded.json()["error"]["code"]) == (404, "not_found")
    assert rpc.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_key_of_another_priority_counts_at_once(edge: Edge) -> None:
    """After a change of the keys file a key's new priority applies without a restart."""
    keys_file = edge.settings.api_keys_file
    assert keys_file is not None
    raised = tuple(key.model_copy(update={"priority": Priority.HIGH}) for key in KEYS.keys)

    write_keys(keys_file, KeysFile(keys=raised))
    wait_for(lambda: edge.shares() == ["100", "100", "100"], what="the new priorities")
    write_keys(keys_file, KEYS)
    wait_for(lambda: edge.shares() == ["50", "75", "100"], what="the old priorities")


def test_plaintext_is_refused_at_both_doors(edge: Edge) -> None:
    """A client without TLS gets no answer."""
    with pytest.raises(httpx.HTTPError):
        httpx.get(edge.rest.replace("https", "http") + "/healthz", timeout=5)
    with (
        grpc.insecure_channel(f"localhost:{edge.settings.grpc_port}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        RecommenderStub(channel).Recommend(pb.RecommendRequest(**REQUEST), timeout=3)
    assert refused.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def test_old_versions_of_tls_are_refused(edge: Edge) -> None:
    """TLS 1.1 is refused, 1.2 and 1.3 are accepted."""
    accepted = []
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = edge.context()
        context.minimum_version = context.maximum_version = version
        accepted.append(edge.call_rest(context).status_code)
    old = edge.context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError) as refused:
        edge.call_rest(old)

    assert accepted == [200, 200]
    assert "PROTOCOL_VERSION" in str(refused.value)


def test_the_edge_replaces_forwarding_headers(edge: Edge) -> None:
    """The edge does not forward the caller's own address, timeout and edge headers."""
    forged = {
        "x-forwarded-for": "6.6.6.6",
        "x-request-timeout-seconds": "0",
        "x-edge-name": "x",
        "x-edge-arrived-ms": "1",
        "x-edge-refused": "normal",
    }
    with httpx.Client(verify=edge.context()) as http:
        seen = http.get(edge.rest + "/headers", headers=forged).json()

    assert seen["x-forwarded-for"] == HOST
    assert not seen.keys() & {"x-request-timeout-seconds", "x-edge-refused"}
    assert seen["x-edge-name"] == socket.gethostname()
    assert 0 <= time.time() * 1_000 - int(seen["x-edge-arrived-ms"]) < 60_000


def test_a_new_certificate_is_used_and_no_connection_breaks(edge: Edge, ca: trustme.CA) -> None:
    """New connections get the new certificate, open ones continue."""
    before = edge.serial()
    assert edge.settings.tls_dir is not None
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    with (
        httpx.Client(verify=edge.context()) as http,
        grpc.secure_channel(f"localhost:{edge.settings.grpc_port}", credentials) as channel,
    ):
        states: list[grpc.ChannelConnectivity] = []
        stub = RecommenderStub(channel)
        stub.Recommend(pb.RecommendRequest(**REQUEST))
        channel.subscribe(states.append)
        stream = http.get(edge.rest + "/healthz").extensions["network_stream"]
        ours = stream.get_extra_info("socket").getsockname()

        issue(ca, edge.settings.tls_dir)
        after = wait_for(lambda: (now := edge.serial()) != before and now, what="the new certificate")
        again = http.get(edge.rest + "/healthz")
        still = stub.Recommend(pb.RecommendRequest(**REQUEST))

        assert again.extensions["network_stream"].get_extra_info("socket").getsockname() == ours
        assert set(states) <= {grpc.ChannelConnectivity.READY}
        assert still.bundle_version == "v1"
        assert after != before


def test_a_certificate_without_its_key_is_refused(edge: Edge, ca: trustme.CA) -> None:
    """Half a rotation keeps the old certificate in use, and the log contains no key."""
    before, folder = edge.serial(), edge.settings.tls_dir
    assert folder is not None
    log = edge.settings.state_dir / "edge.log"
    kept = folder.parent / "kept"
    shutil.copytree(folder, kept)

    (folder / "tls.key").write_bytes(ca.issue_cert("localhost").private_key_pem.bytes())
    wait_for(lambda: "certificates_refused" in log.read_text(), what="the refusal")

    assert edge.serial() == before
    assert edge.call_rest(edge.context()).status_code == 200
    assert "PRIVATE KEY" not in log.read_text()
    shutil.copy(kept / "tls.key", folder / "tls.key")


def test_mutual_tls_and_a_change_of_the_clients_authority(
    tmp_path: Path, ca: trustme.CA, doors: tuple[int, int]
) -> None:
    """REST and gRPC require a certificate of the clients' authority; after a change, only of the new authority."""
    old, new = trustme.CA(), trustme.CA()
    with running_edge(tmp_path / "e", ca, doors, client_ca=old) as edge:
        assert edge.settings.tls_client_ca_file is not None
        for client in (None, ca.issue_cert("somebody")):
            with pytest.raises(httpx.HTTPError):
                edge.call_rest(edge.context(client=client))
            with pytest.raises(grpc.RpcError) as refused:
                edge.call_grpc(client=client)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert edge.call_rest(edge.context(client=old.issue_cert("shop"))).status_code == 200
        assert edge.call_grpc(client=old.issue_cert("shop")).bundle_version == "v1"
        _ask_with_and_without_certificate(edge, tmp_path, old.issue_cert("shop"))
        new.cert_pem.write_to_path(edge.settings.tls_client_ca_file)

        wait_for(lambda: _is_accepted(edge, new), what="a caller of the new authority")

        assert not _is_accepted(edge, old)


def _ask_with_and_without_certificate(edge: Edge, folder: Path, client: trustme.LeafCert) -> None:
    """The installable client works with its certificate over REST and gRPC, and gets the reason without it."""
    edge.ca.cert_pem.write_to_path(folder / "ca.crt")
    client.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    shown = Tls(folder / "ca.crt", folder / "client.pem", folder / "client.pem")
    for address in (edge.rest, f"grpcs://localhost:{edge.settings.grpc_port}"):
        with Client(address, tls=shown) as tailrace:
            assert tailrace.recommend("nobody", deadline_ms=5_000).bundle_version == "v1"
        with Client(address, tls=Tls(folder / "ca.crt")) as tailrace, pytest.raises(TailraceError) as refused:
            tailrace.recommend("nobody")
        assert {refused.value.code, getattr(refused.value.__cause__, "code", None)} >= {"unreachable"}


def _is_accepted(edge: Edge, clients: trustme.CA) -> bool:
    try:
        return edge.call_rest(edge.context(client=clients.issue_cert("shop"))).status_code == 200
    except httpx.HTTPError:
        return False
