"""An HTTP server that answers requests by the steps of a script, and keeps the requests."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers import HOST


@dataclass(frozen=True)
class Step:
    """An answer; a status of 0 closes the connection without an answer."""

    status: int
    body: dict[str, Any] | str = ""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class Script(ThreadingHTTPServer):
    """The steps in order; the last step repeats for all further requests."""

    daemon_threads = True

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__((HOST, 0), _Handler)
        self._steps = list(steps)
        self._lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []

    def next_step(self, request: dict[str, Any]) -> Step:
        with self._lock:
            self.requests.append(request)
            return self._steps[min(len(self.requests), len(self._steps)) - 1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"


@contextmanager
def running(steps: Sequence[Step]) -> Iterator[Script]:
    """Serve the script."""
    server = Script(steps)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_POST(self) -> None:
        """Answer."""
        length = int(self.headers.get("content-length", 0))
        request = {
            "path": self.path,
            "body": json.loads(self.rfile.read(length) or b"null"),
            **{name.lower(): value for name, value in self.headers.items()},
        }
        step = self.server.next_step(request)
        time.sleep(step.delay_s)
        if step.status == 0:
            self.close_connection = True
            return
        body = step.body if isinstance(step.body, str) else json.dumps(step.body)
        self.send_response(step.status)
        for name, value in {"content-length": str(len(body.encode())), **step.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""
