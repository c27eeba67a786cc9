"""A collector of OpenTelemetry, which keeps what it is sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """A collector of OTLP over HTTP, in a thread of this process."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {}
        """Bodies of the requests, by path."""
        self.headers: list[str] = []
        """Header `x-key` of each request."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.setdefault(self.path, []).append(body)
                collector.headers.append(self.headers.get("x-key", ""))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
