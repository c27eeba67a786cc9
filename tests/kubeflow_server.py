"""The status server of Kubeflow Trainer: HTTPS, with a certificate of a made authority, and a token."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from traceml_ray.sinks.kubeflow import CA, TOKEN, URL

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/gpt/status"


class StatusServer:
    """
    The server as a job sees it: it takes a post whose token is `token`.

    Args:
        folder: gets the certificate of its authority, and the token.
    """

    def __init__(self, folder: Path) -> None:
        self.ca, self.token_file = folder / "ca.crt", folder / "token"
        self.token = "first-token"
        self.token_file.write_text(f"{self.token}\n")
        self.posts: list[dict[str, Any]] = []
        self.elsewhere: list[str] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        """Answers of the next posts, before it takes any: status, headers, body."""
        self.let = threading.Semaphore(1 << 20)
        """Acquired for each answer."""
        self.answered = threading.Semaphore(0)
        make_certificates(folder)
        self.server = server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self.base = f"https://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def environ(self) -> dict[str, str]:
        return {URL: self.base + PATH, CA: str(self.ca), TOKEN: str(self.token_file)}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def handler_of(served: StatusServer) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            served.let.acquire()
            if served.answers:
                self.answer(*served.answers.pop(0))
            elif self.headers["Authorization"] != f"Bearer {served.token}":
                message = f"Forbidden for {self.headers['Authorization']}"
                self.answer(403, {}, json.dumps({"kind": "Status", "message": message}).encode())
            elif self.path != PATH:
                self.answer(404, {}, b"")
            else:
                served.posts.append(json.loads(body))
                self.answer(200, {}, body)

        def do_GET(self) -> None:
            served.elsewhere.append(self.headers.get("Authorization", ""))
            self.answer(200, {}, b"")

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            served.answered.release()

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler


def make_certificates(folder: Path) -> None:
    """Write `ca.crt`, and `server.crt` with `server.key`, which it has signed, for 127.0.0.1."""
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    new = ["req", "-newkey", "rsa:2048", "-nodes"]
    for command in (
        [*new, "-x509", "-subj", "/CN=made CA", "-addext", "keyUsage=critical,keyCertSign",
         "-keyout", "ca.key", "-out", "ca.crt"],
        [*new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr"],
        ["x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
         "-extfile", "names", "-out", "server.crt"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=240)
