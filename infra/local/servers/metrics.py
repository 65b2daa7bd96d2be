"""The endpoint that Prometheus scrapes: `/metrics` sums the metrics of all processes of this node."""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from prometheus_client import CONTENT_TYPE_LATEST

from services.observability.node_metrics import render_metrics
from services.settings.settings import ending_with_error, load_settings


class MetricsHandler(BaseHTTPRequestHandler):
    """Answer `/metrics` and `/healthz`; a subclass sets the folder."""

    folder: ClassVar[Path]

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, render_metrics(self.folder))
        elif self.path == "/healthz":
            self._answer(HTTPStatus.OK, "text/plain", b"ok\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"see /metrics\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: a scrape arrives every few seconds."""

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def metrics_server(host: str, port: int, folder: Path) -> ThreadingHTTPServer:
    """Bind the endpoint; the caller runs `serve_forever`."""
    handler = type("NodeMetricsHandler", (MetricsHandler,), {"folder": folder})
    return ThreadingHTTPServer((host, port), handler)


@ending_with_error()
def main() -> None:
    """Serve the metrics of this stack until killed. Bad settings exit with their error."""
    settings = load_settings()
    metrics_server(settings.http_host, settings.metrics_port, settings.metrics_dir).serve_forever()


if __name__ == "__main__":
    main()
