"""The built TypeScript client in a real browser, on a page whose origin forwards one path to a real gateway.

The gateway sends no CORS headers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page

from tests.support.gateway.browser import chromium
from tests.support.gateway.plain_doors import running_plain_doors
from tests.support.node import TYPESCRIPT, npx
from tests.support.servers import HOST

PASSED_ON = "/tailrace"
NOT_PASSED_ON = {"host", "connection", "accept-encoding"}
PRELUDE = """
const { Client, TailraceError } = await import("/client/client.js");
const caught = async (call) => { try { return { answer: await call }; } catch (error) {
  return { isOurs: error instanceof TailraceError, name: error.name, code: error.code, field: error.field, numAttempts: error.numAttempts }; } };
"""


class Shop(ThreadingHTTPServer):
    """A shop's server: a page, the built client, and a path that is forwarded to the gateway."""

    daemon_threads = True

    def __init__(self, built: Path, door: str) -> None:
        super().__init__((HOST, 0), _Handler)
        self.built, self.door = built, door

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Shop
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the page, a file of the client, or the gateway's answer."""
        if self.path.startswith(PASSED_ON):
            self._pass_on()
        elif self.path.startswith("/client/"):
            content = (self.server.built / self.path.removeprefix("/client/")).read_bytes()
            self._send(200, "text/javascript", content)
        else:
            self._send(200, "text/html", b"<!doctype html><title>shop</title>")

    def do_POST(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        url = self.server.door + self.path.removeprefix(PASSED_ON)
        answer = httpx.request(self.command, url, headers=headers, content=body, timeout=30)
        self._send(answer.status_code, answer.headers["content-type"], answer.content)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


@contextmanager
def running_shop(built: Path, door: str) -> Iterator[Shop]:
    """Serve the shop."""
    shop = Shop(built, door)
    thread = threading.Thread(target=shop.serve_forever)
    thread.start()
    try:
        yield shop
    finally:
        shop.shutdown()
        thread.join()
        shop.server_close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client as `make typescript` builds it. Skips without a compiler."""
    folder = tmp_path_factory.mktemp("client")
    done = npx("tsc", "--project", TYPESCRIPT, "--outDir", folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    with running_plain_doors() as (http_port, _):
        yield f"http://{HOST}:{http_port}"


@pytest.fixture
def page(built: Path, door: str) -> Iterator[Page]:
    """The shop's page in a browser. Skips without a browser."""
    with running_shop(built, door) as shop, chromium() as browser:
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(shop.address)
        yield opened
        context.close()


def in_page(page: Page, script: str, *given: Any) -> Any:
    """Run a script in the page with the client's classes, `caught` and `given`; return its result."""
    return page.evaluate(f"async (given) => {{ {PRELUDE} {script} }}", list(given))


def test_a_page_recommends_and_records(page: Page) -> None:
    """Through its origin the page gets an answer, events, an operation by path, and an error with its field."""
    result = in_page(
        page,
        """
        const client = new Client(given[0]);
        const answer = await client.recommend({ user_id: "long", k: 3 }, { deadlineMs: 20_000 });
        const event = { user_id: "long", item_id: answer.items[0].item_id, request_id: answer.request_id, event_id: "e1" };
        const recorded = [await client.record(event), await client.record([event, { user_id: "long", item_id: "i00" }])];
        const bundle = await client.call("get", "/v1/bundle", {});
        return { num: answer.items.length, id: answer.request_id, ids: recorded.map((one) => one.event_ids), items: bundle.num_items,
          wrong: await caught(client.recommend({ user_id: "long", k: -1 }, { deadlineMs: 20_000 })) };
        """,
        PASSED_ON,
    )

    assert (result["num"], len(result["id"]), result["items"]) == (3, 32, 20)
    assert result["ids"][0] == ["e1"]
    assert [result["ids"][1][0], len(result["ids"][1][1])] == ["e1", 32]
    assert result["wrong"] == {
        "isOurs": True,
        "name": "TailraceError",
        "code": "invalid_request",
        "field": "k",
        "numAttempts": 1,
    }


def test_deadlines_signals_and_another_origin_end_a_call(page: Page, door: str) -> None:
    """Browser errors become the client's codes; another origin is unreachable; an abort keeps the caller's reason."""
    result = in_page(
        page,
        """
        const client = new Client(given[0]), direct = new Client(given[1], { retryReserve: 0 });
        const stopped = new AbortController();
        stopped.abort(new RangeError("left the page"));
        return { late: await caught(client.recommend({ user_id: "long" }, { deadlineMs: 0.01 })),
          stopped: await caught(client.recommend({ user_id: "long" }, { signal: stopped.signal })),
          foreign: await caught(direct.recommend({ user_id: "long" }, { deadlineMs: 20_000 })) };
        """,
        PASSED_ON,
        door,
    )

    assert (result["late"]["isOurs"], result["late"]["code"]) == (True, "deadline_exceeded")
    assert (result["stopped"]["isOurs"], result["stopped"]["name"]) == (False, "RangeError")
    assert (result["foreign"]["isOurs"], result["foreign"]["code"]) == (True, "unreachable")
